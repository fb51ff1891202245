"""The settings of ``siammm train``. A field, its flag and its key in a saved run are the same word.

The text under a field is its help on the command line. The defaults are the preset ``cifar``. Importing this module is
light, so that ``--help`` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from siammm.settings.arguments import Positional, arg


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How images are read."""

    image_key: str | None = None
    """Array or column with the images; by default one with a usual name, or the only candidate."""

    label_key: str | None = None
    """Array or column with the labels, which are used only for evaluation; "" reads none."""

    loader: Literal["auto", "resident", "streaming"] = "auto"
    """How images are loaded: resident keeps all of them on the device, streaming reads them with worker processes;
    auto picks resident for images of one size that fit."""

    workers: int | None = None
    """Worker processes of the streaming loader; by default the number of cores minus one, at most 15."""

    max_bad_images: float = 0.01
    """Stop if more than this fraction of the images cannot be read; fewer are skipped and listed."""

    max_pixels: int = 178_956_970
    """Skip images with more pixels than this."""


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """The two augmented views of an image."""

    image_size: int | None = None
    """Width and height of the images in pixels; by default their own up to 96, and 224 for larger images."""

    view_size: int | None = None
    """Width and height of the training views; by default the image size. Smaller views train faster."""

    augmentation: Literal["auto", "digits", "32", "64", "224"] = "auto"
    """Augmentations tuned for images of this many pixels, or digits: no flip and no colour. auto follows the image
    size."""

    crop_scale: float | None = None
    """Smallest fraction of the image in a random crop; by default that of the augmentation."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The encoder and its heads."""

    backbone: str = "resnet18"
    """Any timm model, or conv-small for images of 8 to 16 pixels. With --weights, by default their model."""

    weights: str = "none"
    """Initial weights of the backbone: lite, timm:MODEL, timm:MODEL:WEIGHTS, torchvision:MODEL:WEIGHTS or an earlier
    run; none for random weights."""

    embedding_dim: int = 256
    """Dimensions of the embedding that is clustered."""

    hidden_dim: int = 2048
    """Width of the hidden layers of projector and predictor."""

    projector_layers: int = 3
    """Layers of the projector, from the backbone to the embedding."""

    projector_norm: Literal["none", "plain"] = "plain"
    """Normalisation of the embedding: plain is BatchNorm without scale and shift (as in MoCo v3), none as in SwAV."""

    predictor_layers: int = 2
    """Layers of the predictor, which predicts one view's embedding from the other's; 0 for no predictor."""

    predictor_hidden_dim: int | None = None
    """Width of the predictor's hidden layers; by default that of the projector."""

    predictor_norm: Literal["none", "plain"] = "none"
    """Normalisation of the predictor's output: none is as in MoCo v3's ResNets, plain is BatchNorm."""

    predictor_noise: float = 0.0
    """Standard deviation of the noise added to the predictor's input in training (ProPos)."""

    momentum_encoder: bool = True
    """Compute targets with a momentum encoder. Not used by the simsiam loss."""

    zero_init_residual: bool = True
    """Start every residual block as the identity."""


# Mean concentration of the NCE losses, the inverse of the temperature that SwAV and DeepCluster v2 contrast with.
NCE_CONCENTRATION = 10.0


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised (Eq. 13): the instance loss plus the cluster loss."""

    instance_loss: Literal["cosine", "simsiam", "contrastive", "none"] = "contrastive"
    """Loss between the two views of an image: cosine to a momentum encoder (the paper, BYOL), simsiam, contrastive as
    in MoCo v3, or none."""

    cluster_loss: Literal["mle", "nce-centroids", "nce-samples", "swapped", "scattering", "none"] = "mle"
    """Loss between an image and its clusters: likelihood (Eq. 9), contrast with other centroids (Eq. 14) or samples
    of other clusters (Eq. 15), SwAV's swapped prediction, ProPos's scattering, or none."""

    cluster_weight: float = 1.0
    """Weight of the cluster loss."""

    group_weight: float = 1.0
    """With --group-after: weight of the loss that tells groups apart."""

    group_levels: Literal["groups", "both"] = "groups"
    """With --group-after: train with groups instead of clusters, or with both levels."""

    n_neighbours: int = 5
    """Nearest clusters that an image is softly assigned to (H); 1 is hard assignment."""

    temperature: float = 0.02
    """Temperature of the soft assignment (tau); lower is closer to hard assignment."""

    size_weighting: bool = False
    """Weigh clusters by their size in the assignment (alpha)."""

    concentration: Literal["per-component", "closed-form", "constant", "proximity"] = "per-component"
    """How to compute the concentration of a cluster, which sets how strongly it pulls: estimated per component, by the
    paper's closed form, the same for all, or by proximity as in PCL."""

    concentration_dims: int | None = None
    """Estimate concentrations in this many principal directions (the paper's appendix); by default in all."""

    concentration_scale: float | Literal["auto", "literal"] = "auto"
    """Rescale the clipped concentrations to this mean in the loss. auto: 1 for mle, 10 for the two NCE losses, whose
    contrast is too soft at 1 (they are divided by 10, so that their weight is the same); literal: as estimated."""

    normaliser: bool = False
    """Keep the normalising constant of the density in Eq. 9; the paper leaves it out."""

    n_negatives: int = 16_000
    """With nce-centroids: maximum number of centroids that a view is contrasted with."""

    contrastive_temperature: float = 0.2
    """Temperature of the contrastive instance loss; lower values push the most similar images apart."""

    contrastive_temperature_end: float | None = None
    """Final temperature of the contrastive instance loss, reached along a cosine; by default it stays constant."""

    n_prototypes: int = 3000
    """With swapped: number of learned prototypes."""

    prototype_temperature: float = 0.1
    """Temperature over prototypes, with swapped, scattering or proximity concentrations."""

    queue_size: int = 0
    """Embeddings of earlier batches to keep: negatives of the contrastive loss, or more samples for swapped."""

    queue_after: float = 0.0
    """With swapped: fraction of the epochs before the queue is used."""

    @property
    def uses_mixture(self) -> bool:
        """Whether training fits a mixture; SwAV learns its prototypes with the encoder instead."""
        return self.cluster_loss not in ("none", "swapped")

    @property
    def sharpened(self) -> bool:
        """Whether ``concentration_scale="auto"`` sharpens a contrast; PCL's concentrations have a scale already."""
        is_auto = self.concentration_scale == "auto" and self.concentration != "proximity"
        return is_auto and self.cluster_loss in ("nce-centroids", "nce-samples")


@dataclass(frozen=True, kw_only=True)
class ClusteringConfig:
    """The mixture: how many clusters, how they are updated and merged."""

    n_components: int | None = None
    """Number of clusters to start from; by default 8 % of the images. With --merge none, the number of clusters."""

    more_components: tuple[int, ...] = ()
    """Sizes of further clusterings to train with (DeepCluster v2, PCL); only the first is saved."""

    cluster_after: float = 0.25
    """Fraction of the epochs to train with the instance loss alone before clustering starts."""

    group_after: float = 1.0
    """Fraction of the epochs after which groups of images are looked for and trained with; 1 for never."""

    n_groups: int | None = None
    """Number of groups at the end, if you know it; by default it is found, unless --merge is none."""

    embeddings: Literal["bank", "clean"] = "bank"
    """Cluster the embeddings of the training views, or of a separate pass without augmentation."""

    centroids: Literal["consistent", "reinitialised"] = "consistent"
    """Carry centroids over from epoch to epoch, or start again in each epoch (the paper's ablation)."""

    n_init: int = 1
    """With reinitialised centroids: initialisations per epoch, each with all --em-steps; the best is kept."""

    em_steps: int = 1
    """EM steps before each epoch."""

    merge: Literal["auto", "paper", "none"] = "auto"
    """Merge clusters: auto finds their number, paper merges by Eq. 11 down to --merge-floor, none keeps all."""

    merge_threshold: float = -1.2
    """With merge paper: z-score of the distance below which a pair is merged (zeta)."""

    merge_floor: int = 2
    """Smallest number of clusters to merge down to."""

    merge_share: float = 0.05
    """With merge auto: largest fraction of the clusters to merge per epoch."""


@dataclass(frozen=True, kw_only=True)
class OptimisationConfig:
    """Epochs, batches, the optimiser and its precision."""

    epochs: int = 200
    """Passes over the images."""

    batch_size: int = 256
    """Images per update, over all processes."""

    accumulate: int = 1
    """Split each batch into this many parts to save memory; BatchNorm and contrastive losses see one part at a time."""

    optimiser: Literal["lars", "muon", "sgd", "adamw"] = "lars"
    """LARS (the paper), Muon for the backbone's matrices with LARS for the rest, SGD with momentum, or AdamW."""

    learning_rate: float = 2.0
    """Base learning rate per 256 images; it scales with the batch size. LARS and Muon: 0.3 to 6, SGD: 0.03 to 0.3."""

    weight_decay: float = 1e-5
    """Weight decay, except of biases, normalisation layers and matrices that Muon updates."""

    momentum: float = 0.9
    """Momentum of LARS, Muon and SGD, and the first beta of AdamW."""

    trust_coefficient: float = 0.001
    """LARS and Muon: step size relative to the norm of the weights, at a learning rate of 1."""

    warmup_epochs: float = 10
    """Epochs of linear warm-up, at most half of all; the learning rate then decays to 0 along a cosine."""

    encoder_momentum: float = 0.98
    """Initial momentum of the momentum encoder; it rises to 1 along a cosine."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the networks; auto is bf16 on GPUs that support it, fp32 elsewhere."""

    compile: bool | None = None
    """Compile augmentation, loss and networks that are not fused; by default on a GPU."""

    fused: bool | None = None
    """Train on both views in one batch with fused Triton kernels; by default on GPUs, for networks that allow it."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Device, seed, checkpoints and what is measured during training."""

    probe: str | None = None
    """Labelled images to evaluate the features on during training (kNN, linear probe); never trained on."""

    probe_every: int | None = None
    """Epochs between evaluations with --probe, or on the labels of DATA; by default a tenth of all epochs."""

    image_cache: str | None = None
    """Folder for resized copies of large images, made when the images are first read and reused by later runs."""

    save_every: float = 5.0
    """Minutes between checkpoints; one is also written when the run is stopped."""

    tensorboard: bool = True
    """Write TensorBoard files, if tensorboard is installed."""

    device: str = "auto"
    """Device to compute on: auto, cpu, cuda, cuda:1, mps."""

    random_state: int = 0
    """Random seed; on a CPU, the same seed gives the same run on the same machine."""


PresetName = Literal["cifar", "cifar-fast", "tiny", "photos", "laptop", "demo", "imagenet-100", "imagenet-200"]
MethodName = Literal["siammm", "byol", "simsiam", "moco-v3", "swav", "deepcluster-v2", "pcl", "propos"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train an encoder on unlabelled images, and find the clusters in them and their number.

    DATA is a folder of images, a .npz, .npy or .parquet file, a folder of Parquet files or tar shards, a data set saved
    by Hugging Face datasets, torchvision:CIFAR10:/path, or digits. Writes a run folder. Ctrl-C saves a checkpoint;
    siammm train --resume RUN continues from it.
    """

    data: Annotated[Positional[str | None], arg(metavar="DATA")] = None
    """The images. Labels are never used for training."""

    output: Path | None = None
    """Run folder to write; by default <name of the data>-run in the current folder."""

    overwrite: bool = False
    """Replace an earlier run in the output folder."""

    resume: Path | None = None
    """Continue this run from its last checkpoint, with its own settings; --epochs, --learning-rate and
    --warmup-epochs may change."""

    resume_if_exists: bool = False
    """Continue the run in the output folder if there is one, otherwise start it. A job can then be restarted with the
    same command."""

    allow_data_change: bool = False
    """With --resume: continue although images were changed, added or removed; images that are still there keep their
    clusters, matched by name."""

    preset: PresetName = "cifar"
    """Settings to start from: cifar (32 px), cifar-fast (32 px, GPU), tiny (64 px), photos (from pretrained weights;
    try siammm cluster first), laptop (CPU), demo, or the paper's imagenet-100 and imagenet-200. With --weights, the
    default is photos."""

    method: MethodName = "siammm"
    """SiamMM, or a method to compare it with, with the objective and recipe of its paper."""

    # In the help, groups of the same name are one, and so is their text.
    reading: Annotated[DataConfig, arg(name="data")] = field(default_factory=DataConfig)
    """How images are read and augmented."""
    views: Annotated[ViewConfig, arg(name="data")] = field(default_factory=ViewConfig)
    """How images are read and augmented."""
    network: Annotated[NetworkConfig, arg(name="learning")] = field(default_factory=NetworkConfig)
    """The network and the loss: instance loss plus cluster loss (Eq. 13)."""
    objective: Annotated[ObjectiveConfig, arg(name="learning")] = field(default_factory=ObjectiveConfig)
    """The network and the loss: instance loss plus cluster loss (Eq. 13)."""
    clustering: Annotated[ClusteringConfig, arg(name="cluster")] = field(default_factory=ClusteringConfig)
    optimisation: OptimisationConfig = field(default_factory=OptimisationConfig)
    run: RunConfig = field(default_factory=RunConfig)
