"""The settings of ``siammm train``: a field, its flag and its key in a saved run are the same word.

The text under a field is its help on the command line. Importing this is light, so that ``--help`` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How images are read."""

    image_key: str | None = None
    """The array or column with the images; by default the usual names, or the only candidate."""

    label_key: str | None = None
    """The array or column with the labels, which only ever judge the result; "" reads none."""

    loader: Literal["auto", "resident", "streaming"] = "auto"
    """Keep all images on the device, or let worker processes read them; auto keeps what is small and fits."""

    workers: int | None = None
    """Processes that read images for the streaming loader; by default one for each core but one, at most 15."""

    max_bad_images: float = 0.01
    """Stop if more than this share of the images cannot be read; fewer are set aside in a list."""

    max_pixels: int = 178_956_970
    """Images with more pixels than this are set aside unread."""


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """The two augmented views of an image."""

    image_size: int | None = None
    """Width and height of an image in pixels; by default its own up to 96, and 224 for larger ones."""

    view_size: int | None = None
    """Width and height of a view in training; by default those of an image. Smaller views train faster."""

    augmentation: Literal["auto", "digits", "32", "64", "224"] = "auto"
    """The set of augmentations: that for images of this many pixels, or digits, without mirroring or colour."""

    crop_scale: float | None = None
    """The least share of an image that a view shows; by default that of the augmentation."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The encoder and its heads."""

    backbone: str = "resnet18"
    """Any model of timm by name, or conv-small for images of 8 to 16 pixels."""

    embedding_dim: int = 256
    """Dimensions of the space in which images are clustered."""

    hidden_dim: int = 2048
    """Width of the hidden layers of projector and predictor."""

    projector_layers: int = 3
    """Layers between the backbone and the embedding."""

    projector_norm: Literal["none", "plain"] = "plain"
    """Normalisation of the embedding: BatchNorm without scale and shift, as in MoCo v3, or none, as in SwAV."""

    predictor_layers: int = 2
    """Layers that predict one view's embedding from the other's; 0 for none."""

    predictor_hidden_dim: int | None = None
    """Width of the predictor's hidden layers; by default that of the projector's."""

    predictor_norm: Literal["none", "plain"] = "none"
    """Normalisation of the predictor's output: none, as MoCo v3 has it for ResNets, or BatchNorm as elsewhere."""

    predictor_noise: float = 0.0
    """Deviation of the noise that is added to what the predictor reads, in training (ProPos)."""

    momentum_encoder: bool = True
    """Whether a momentum encoder makes the targets; it does unless this flag is given, or the loss is simsiam."""

    zero_init_residual: bool = True
    """Whether every residual block starts as the identity; it does unless this flag is given."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised (Eq. 13): the loss between views and the loss between images and their clusters."""

    instance_loss: Literal["cosine", "simsiam", "contrastive", "none"] = "cosine"
    """Between the views of an image: cosine to a momentum encoder (the paper, BYOL), SimSiam's, MoCo v3's, or none."""

    cluster_loss: Literal["mle", "nce-centroids", "nce-samples", "swapped", "scattering", "none"] = "mle"
    """To the clusters: likelihood (Eq. 9), contrasted with other centroids (14) or images (15); SwAV's, ProPos's; none.
    """

    cluster_weight: float = 1.0
    """What the cluster loss is multiplied with."""

    n_neighbours: int = 5
    """Clusters that an image may belong to in part, its nearest ones (H); 1 assigns every image to one."""

    temperature: float = 0.02
    """How sharply an image prefers the nearest of them (tau); smaller is sharper."""

    size_weighting: bool = False
    """Prefer large clusters to small ones at the same distance (alpha)."""

    concentration: Literal["per-component", "closed-form", "constant", "proximity"] = "per-component"
    """Pull harder towards tight clusters: estimated for each, by the paper's formula, the same for all, or PCL's."""

    concentration_dims: int | None = None
    """Measure concentrations in this many principal directions (the paper's appendix); by default in all."""

    concentration_scale: float | Literal["literal"] = 1.0
    """The mean of the concentrations in the loss, after clipping the extremes; literal takes them as estimated."""

    normaliser: bool = False
    """Keep the density's normalising constant in Eq. 9; the paper leaves it out."""

    n_negatives: int = 16_000
    """With nce-centroids: how many other centroids a view is contrasted with, at most."""

    contrastive_temperature: float = 1.0
    """With a contrastive instance loss: its temperature; lower ones push the most similar images apart."""

    contrastive_temperature_end: float | None = None
    """With a contrastive instance loss: its temperature at the end, reached along a cosine; by default it stays."""

    n_prototypes: int = 3000
    """With swapped: prototypes that are learnt."""

    prototype_temperature: float = 0.1
    """With swapped or scattering, or concentrations by proximity: the temperature over prototypes."""

    queue_size: int = 0
    """Embeddings of earlier batches that serve as negatives of a contrastive loss, or fill up the batch of swapped."""

    queue_after: float = 0.0
    """With swapped: the share of the epochs before the queue is used."""

    @property
    def uses_mixture(self) -> bool:
        """Whether training keeps a mixture: SwAV's prototypes are learnt with the encoder, and need none."""
        return self.cluster_loss not in ("none", "swapped")


@dataclass(frozen=True, kw_only=True)
class ClusteringConfig:
    """The mixture: how many clusters, how they are carried over, how they merge."""

    n_components: int | None = None
    """Clusters to start from; by default 8 % of the images, at least 2."""

    more_components: tuple[int, ...] = ()
    """Further clusterings of these sizes, trained with beside the first (DeepCluster v2, PCL); the first is kept."""

    cluster_after: float = 0.0
    """The share of the epochs that the instance loss trains alone before clustering begins."""

    embeddings: Literal["bank", "clean"] = "bank"
    """Cluster the embeddings that training made of the two views, or those of a separate pass without augmentation."""

    centroids: Literal["consistent", "reinitialised"] = "consistent"
    """Carry centroids over from epoch to epoch, or start the clustering anew in each (the paper's ablation)."""

    n_init: int = 1
    """With reinitialised centroids: starts to try in each epoch; the best is kept."""

    em_steps: int = 1
    """E and M steps before each epoch."""

    merge: Literal["auto", "paper", "none"] = "auto"
    """Merge clusters: auto stops by itself and so finds their number, paper follows Eq. 11 to the floor, none."""

    merge_threshold: float = -1.2
    """With merge paper: how far below the mean, in deviations, the distance of a pair must be (zeta)."""

    merge_floor: int = 2
    """Never merge to fewer clusters than this."""

    merge_share: float = 0.05
    """With merge auto: at most this share of the clusters disappears after one epoch."""


@dataclass(frozen=True, kw_only=True)
class OptimisationConfig:
    """How long, how fast, in what precision."""

    epochs: int = 200
    """Passes over the images."""

    batch_size: int = 256
    """Images in one update, over all processes."""

    accumulate: int = 1
    """Parts that a batch is worked through in, to save memory; BatchNorm and contrast see one part at a time."""

    optimiser: Literal["lars", "muon", "sgd", "adamw"] = "lars"
    """LARS as in the paper, Muon for the backbone's matrices and LARS for the rest, SGD with momentum, or AdamW."""

    learning_rate: float = 2.0
    """Base rate, for 256 images a batch; it grows with the batch. Of LARS and Muon 0.3 to 6, of SGD 0.03 to 0.3."""

    weight_decay: float = 1e-5
    """Weight decay of all weights but biases, normalisations, and matrices that Muon turns."""

    momentum: float = 0.9
    """Momentum of LARS, Muon and SGD, and the first beta of AdamW."""

    trust_coefficient: float = 0.001
    """LARS and Muon: the size of a step of rate 1, as a share of the weight's own size."""

    warmup_epochs: float = 10
    """Epochs over which the rate rises, at most half of all; then it falls to 0 along a cosine."""

    encoder_momentum: float = 0.98
    """Momentum of the momentum encoder at the start; it rises to 1 along a cosine."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of the networks; auto is bf16 on a GPU that has it, fp32 elsewhere."""

    compile: bool | None = None
    """Compile the augmentation, the loss and networks that are not fused; by default on a GPU."""

    fused: bool | None = None
    """Train on both views in one batch, by kernels of our own; by default on one GPU, for networks that allow it."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where it runs, what it writes and how it watches itself."""

    probe: str | None = None
    """A labelled set of images to measure the features on while training (kNN, linear probe); it trains nothing."""

    probe_every: int | None = None
    """Epochs between measurements with labels; by default a tenth of all."""

    image_cache: str | None = None
    """A folder for shrunken copies of large images, made at the first look; every later epoch and run reads these."""

    save_every: float = 5.0
    """Minutes between checkpoints, which a stopped run goes on from; one is also written when it is stopped."""

    tensorboard: bool = True
    """Whether TensorBoard files are written, if tensorboard is installed; they are unless this flag is given."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""

    random_state: int = 0
    """Seed of everything random; the same seed gives the same run on the same machine."""


PresetName = Literal["cifar", "cifar-fast", "tiny", "laptop", "demo", "imagenet-100", "imagenet-200"]
MethodName = Literal["siammm", "byol", "simsiam", "moco-v3", "swav", "deepcluster-v2", "pcl", "propos"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Learn an encoder and the clusters of a set of images, and how many there are, without labels.

    DATA is a folder of images, a .npz, .npy or .parquet file, a folder of Parquet files or tar shards, a data set saved
    by Hugging Face datasets, torchvision:CIFAR10:/path, or digits. Writes a run folder; Ctrl-C saves, and
    siammm train --resume RUN goes on.
    """

    data: Annotated[Positional[str | None], arg(metavar="DATA")] = None
    """The images. Labels, where there are any, never reach training."""

    output: Path | None = None
    """The run folder; by default <name of the data>-run, here."""

    overwrite: bool = False
    """Replace an earlier run in the output folder."""

    resume: Path | None = None
    """Go on with this run where it was left; it keeps its own settings."""

    # The other defaults here are the paper's objective, not those of this preset: start from ``PRESETS``.
    preset: PresetName = "cifar"
    """Start from: cifar (32 px), cifar-fast (GPU), tiny (64 px), laptop (CPU), demo, imagenet-100 and -200 (paper)."""

    method: MethodName = "siammm"
    """What is trained: SiamMM, or one of its peers, for comparison, with the objective and recipe of its paper."""

    reading: DataConfig = field(default_factory=DataConfig)
    views: ViewConfig = field(default_factory=ViewConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    clustering: ClusteringConfig = field(default_factory=ClusteringConfig)
    optimisation: OptimisationConfig = field(default_factory=OptimisationConfig)
    run: RunConfig = field(default_factory=RunConfig)
