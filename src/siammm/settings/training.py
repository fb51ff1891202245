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
    """Array or column with the labels, which are used only for scores; "" ignores labels."""

    loader: Literal["auto", "resident", "streaming"] = "auto"
    """How images are loaded: resident keeps all of them in the memory of the device, streaming reads them with worker
    processes. auto uses resident for images of one size that fit; use streaming if memory runs out."""

    workers: int | None = None
    """Worker processes of the streaming loader; by default the number of cores minus one, at most 15. Raise it if the
    GPU waits for images."""

    max_bad_images: float = 0.01
    """Stop if more than this fraction of the images cannot be read. Up to it, they are skipped and listed."""

    max_pixels: int = 178_956_970
    """Skip images with more pixels than this, because a small file can claim to be a very large image."""


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """The two augmented views of an image."""

    image_size: int | None = None
    """Resize images to this width and height in pixels; by default their own size up to 96 pixels, and 224 for larger
    images."""

    view_size: int | None = None
    """Width and height of the training views; by default the image size. Three quarters of it trains faster."""

    augmentation: Literal["auto", "digits", "32", "64", "224"] = "auto"
    """Augmentations tuned for images of this many pixels, or digits, which neither flips images nor changes their
    colours. auto chooses by the image size."""

    crop_scale: float | None = None
    """Smallest fraction of the image in a random crop; by default set by the augmentation. Raise it if the objects are
    cut off."""


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """The encoder and its heads."""

    backbone: str = "resnet18"
    """Network to train: any timm model, or conv-small for images of 8 to 16 pixels. With --weights, by default the
    model of the weights."""

    weights: str = "none"
    """Initial weights of the backbone: lite, timm:MODEL, timm:MODEL:WEIGHTS, torchvision:MODEL:WEIGHTS or an earlier
    run; none for random weights."""

    embedding_dim: int = 256
    """Dimensions of the embedding that is clustered."""

    hidden_dim: int = 2048
    """Width of the hidden layers of projector and predictor."""

    projector_layers: int = 3
    """Layers of the projector, which maps the backbone's features to the embedding."""

    projector_norm: Literal["none", "plain"] = "plain"
    """Normalisation of the embedding: plain is BatchNorm without scale and shift (as in MoCo v3), none is as in
    SwAV."""

    predictor_layers: int = 2
    """Layers of the predictor, which predicts one view's embedding from the other's; 0 for no predictor."""

    predictor_hidden_dim: int | None = None
    """Width of the predictor's hidden layers; by default --hidden-dim."""

    predictor_norm: Literal["none", "plain"] = "none"
    """Normalisation of the predictor's output: none is as in MoCo v3's ResNets, plain is BatchNorm."""

    predictor_noise: float = 0.0
    """Standard deviation of the noise added to the predictor's input in training (ProPos); 0 for none."""

    momentum_encoder: bool = True
    """Compute targets with a momentum encoder. Not used by the simsiam loss."""

    zero_init_residual: bool = True
    """Initialise every residual block as the identity."""


# Mean concentration of the NCE losses, the inverse of the temperature that SwAV and DeepCluster v2 contrast with.
NCE_CONCENTRATION = 10.0


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised (Eq. 13): the instance loss plus the cluster loss."""

    instance_loss: Literal["cosine", "simsiam", "contrastive", "none"] = "contrastive"
    """Loss between the two views of an image: cosine to a momentum encoder (the paper, BYOL), simsiam, contrastive as
    in MoCo v3, or none."""

    cluster_loss: Literal["mle", "nce-centroids", "nce-samples", "swapped", "scattering", "none"] = "mle"
    """Loss between an image and its clusters: mle is the likelihood (Eq. 9), nce-centroids contrasts with other
    centroids (Eq. 14), nce-samples with samples of other clusters (Eq. 15), swapped is SwAV's, scattering is ProPos's,
    none is for the instance loss alone."""

    cluster_weight: float = 1.0
    """Weight of the cluster loss relative to the instance loss. Lower it if the encoder collapses."""

    group_weight: float = 1.0
    """With --group-after: weight of the loss that separates groups."""

    group_levels: Literal["groups", "both"] = "groups"
    """With --group-after: train with groups instead of clusters, or with both."""

    n_neighbours: int = 5
    """Number of nearest clusters that an image is softly assigned to (H); 1 is hard assignment."""

    temperature: float = 0.02
    """Temperature of the soft assignment (tau); lower values are closer to hard assignment."""

    size_weighting: bool = False
    """Weight clusters by their size in the assignment (alpha)."""

    concentration: Literal["per-component", "closed-form", "constant", "proximity"] = "per-component"
    """How to estimate the concentration of a cluster, which sets how strongly it attracts its images: per-component, by
    the paper's closed form, the same constant for all, or by proximity as in PCL."""

    concentration_dims: int | None = None
    """Estimate concentrations in this many principal directions (the paper's appendix); by default in all
    dimensions."""

    concentration_scale: float | Literal["auto", "literal"] = "auto"
    """Rescale concentrations to this mean in the loss. auto is 1 for mle and 10 for the NCE losses, whose contrast is
    too soft at 1 and whose weight is divided by 10 in return; literal does not rescale."""

    normaliser: bool = False
    """Keep the normalising constant of the density in Eq. 9, which the paper leaves out."""

    n_negatives: int = 16_000
    """With nce-centroids: maximum number of centroids that a view is contrasted with."""

    contrastive_temperature: float = 0.2
    """Temperature of the contrastive instance loss; lower values push the most similar images further apart."""

    contrastive_temperature_end: float | None = None
    """Final temperature of the contrastive instance loss, reached along a cosine; by default the temperature is
    constant."""

    n_prototypes: int = 3000
    """With swapped: number of learned prototypes."""

    prototype_temperature: float = 0.1
    """With swapped, scattering or proximity concentrations: temperature over the prototypes."""

    queue_size: int = 0
    """Number of embeddings of earlier batches to keep, as negatives of the contrastive loss or as further samples for
    swapped."""

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
    """Number of clusters to start from; by default 8 % of the images. With --merge none, this is also the final
    number."""

    more_components: tuple[int, ...] = ()
    """Sizes of additional clusterings to train with (DeepCluster v2, PCL). Only the first clustering is saved."""

    cluster_after: float = 0.25
    """Fraction of the epochs to train with the instance loss alone before clustering starts. Raise it if too few
    clusters are left at the end."""

    group_after: float = 1.0
    """Fraction of the epochs after which training also looks for groups and learns to separate them; 1 is never."""

    n_groups: int | None = None
    """Number of groups at the end, if you know it; by default it is estimated, unless --merge is none."""

    embeddings: Literal["bank", "clean"] = "bank"
    """Embeddings to cluster: bank is those of the training views, clean is a separate pass without augmentation, which
    is slower."""

    centroids: Literal["consistent", "reinitialised"] = "consistent"
    """consistent carries the centroids over from epoch to epoch, reinitialised starts again in each epoch (the paper's
    ablation)."""

    n_init: int = 1
    """With reinitialised centroids: number of initialisations per epoch, each with all --em-steps; the best is kept."""

    em_steps: int = 1
    """EM steps before each epoch."""

    merge: Literal["auto", "paper", "none"] = "auto"
    """How clusters are merged: auto finds their number, paper merges by Eq. 11 down to --merge-floor, none keeps
    all."""

    merge_threshold: float = -1.2
    """With merge paper: merge pairs whose distance has a z-score below this (zeta)."""

    merge_floor: int = 2
    """Smallest number of clusters to merge down to."""

    merge_share: float = 0.05
    """With merge auto: largest fraction of the clusters to merge per epoch. Lower it if too few clusters are left."""


@dataclass(frozen=True, kw_only=True)
class OptimisationConfig:
    """Epochs, batches, the optimiser and its precision."""

    epochs: int = 200
    """Number of passes over the images."""

    batch_size: int = 256
    """Images per update, over all processes. Lower it if memory runs out."""

    accumulate: int = 1
    """Split each batch into this many parts to save memory. BatchNorm and contrastive losses then see one part at a
    time."""

    optimiser: Literal["lars", "muon", "sgd", "adamw"] = "lars"
    """LARS (the paper), Muon for the backbone's weight matrices with LARS for the rest, SGD with momentum, or AdamW."""

    learning_rate: float = 2.0
    """Learning rate per 256 images; it scales with the batch size. Typical values: LARS and Muon 0.3 to 6, SGD 0.03 to
    0.3."""

    weight_decay: float = 1e-5
    """Weight decay; biases, normalisation layers and matrices that Muon updates have none."""

    momentum: float = 0.9
    """Momentum of LARS, Muon and SGD, and the first beta of AdamW."""

    trust_coefficient: float = 0.001
    """LARS and Muon: size of a step relative to the norm of the weights, at a learning rate of 1."""

    warmup_epochs: float = 10
    """Epochs of linear warm-up, at most half of all. The learning rate then decays to 0 along a cosine."""

    encoder_momentum: float = 0.98
    """Initial momentum of the momentum encoder; it rises to 1 along a cosine."""

    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Precision of the networks. auto is bf16 on GPUs that support it and fp32 elsewhere; use fp32 if the loss becomes
    NaN."""

    compile: bool | None = None
    """Compile augmentation, loss and those networks that are not fused; by default only on a GPU. The first update then
    takes a minute or more."""

    fused: bool | None = None
    """Train on both views in one batch with fused Triton kernels; by default on GPUs, for networks that support it."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Device, seed, checkpoints and what is measured during training."""

    probe: str | None = None
    """Labelled images on which to measure the features during training (kNN, linear probe); they are never trained
    on."""

    probe_every: int | None = None
    """Epochs between measurements with --probe or with the labels of DATA; by default a tenth of all epochs."""

    image_cache: str | None = None
    """Folder for small copies of large images, which later epochs and runs read instead. Use it for photographs of a
    camera."""

    save_every: float = 5.0
    """Minutes between checkpoints. One is also written when the run is stopped."""

    tensorboard: bool = True
    """Write TensorBoard files, if tensorboard is installed."""

    device: str = "auto"
    """Device to compute on: auto, cpu, cuda, cuda:1 or mps."""

    random_state: int = 0
    """Random seed. On a CPU, the same seed gives the same run on the same machine."""


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
    """Continue this run from its last checkpoint, with its own settings. Only --epochs, --learning-rate,
    --warmup-epochs and settings that do not affect training can be changed."""

    resume_if_exists: bool = False
    """Continue the run in the output folder if there is one, otherwise start it, so that a job can be restarted with
    the same command."""

    allow_data_change: bool = False
    """With --resume: continue although images were changed, added or removed. Images that still exist keep their
    clusters, matched by name."""

    preset: PresetName = "cifar"
    """Settings to start from; other flags override them. cifar is for images of 32 pixels, cifar-fast for 32 pixels on
    a GPU, tiny for 64 pixels, photos for photographs with pretrained weights (try siammm cluster first), laptop for a
    CPU, demo for digits, imagenet-100 and imagenet-200 are the paper's. With --weights, the default is photos."""

    method: MethodName = "siammm"
    """Train SiamMM, or another method for comparison, with the objective and recipe of its paper."""

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
