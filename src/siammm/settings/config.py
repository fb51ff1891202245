"""The settings of every command: a field, its flag and its key in a saved run are the same word.

The text under a field is its help on the command line. Importing this is light, so that ``--help`` answers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Train on scikit-learn's handwritten digits without their labels, and show what was found. Takes minutes."""

    random_state: int = 0
    """Seed of everything random; the same seed finds the same clusters."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Find the clusters in a table of embeddings, and how many there are.

    Writes a folder with the cluster of every row (assignments.parquet), the model
    (mixture.safetensors) and summary.json.
    """

    embeddings: Positional[Path]
    """The table: a .npy, .npz, .parquet or .safetensors file, one row a sample."""

    output: Path | None = None
    """The folder to write; by default <name of the table>-clusters, here."""

    overwrite: bool = False
    """Replace an earlier result in the output folder, once the new one is complete."""

    key: str | None = None
    """The array or column with the embeddings; by default embeddings, features, vector or X, or the only candidate."""

    id_column: str | None = None
    """The array or column of ids, which are carried through; by default id, path or filename; "" reads none."""

    label_column: str | None = None
    """The array or column of labels, used only to score; by default label, y, target or class; "" reads none."""

    family: Literal["von-mises-fisher", "gaussian"] = "von-mises-fisher"
    """The kind of component: von-mises-fisher looks at directions alone, gaussian also at lengths."""

    n_components: int | None = None
    """Components to start from; by default 8 % of the rows, bounded. Without merging, the number of clusters."""

    n_neighbours: int = 5
    """Components that a sample may belong to in part, its nearest ones; 1 assigns every sample to one."""

    temperature: float = 0.02
    """How sharply a sample prefers the nearest of them; smaller is sharper."""

    assignment: Literal["nearest", "posterior"] = "nearest"
    """Weigh components by similarity and temperature, as the paper does, or by density, as textbook EM does."""

    size_weighting: bool = False
    """Prefer large components to small ones at the same distance."""

    merge: Literal["auto", "paper", "none"] = "auto"
    """Merge components: auto stops by itself and so finds their number, paper goes on to the floor, none keeps all."""

    merge_threshold: float = -1.2
    """With merge paper: how far below the mean, in deviations, the distance of a pair must be."""

    merge_floor: int = 1
    """Never merge to fewer components than this."""

    merge_share: float = 0.1
    """At most this share of the components disappears in one round of merging."""

    concentration: Literal["per-component", "closed-form", "shared"] | float = "per-component"
    """Von Mises-Fisher: a concentration for each component, the paper's formula for it, one for all, or this number."""

    concentration_dims: int | None = None
    """Von Mises-Fisher: measure concentrations in this many principal directions; by default in all dimensions."""

    small_sample_correction: bool | None = None
    """Von Mises-Fisher: remove the bias of components with few samples; by default unless assignment is posterior."""

    concentration_shrinkage: float | None = None
    """Von Mises-Fisher: samples of average spread added to every component; by default 1, or 0 with posterior."""

    covariance: Literal["spherical", "diag"] = "spherical"
    """Gaussian: one variance for each component, or one for each of its dimensions."""

    init: Literal["k-means++", "random"] | Path = "k-means++"
    """Where components start: spread out, at random samples, or from the mixture of an earlier result."""

    n_init: int = 1
    """Starts to try; the best is kept."""

    max_iter: int = 100
    """The most EM steps after merging."""

    tol: float = 1e-4
    """Stop when the mean log likelihood of a sample moves by less."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""

    backend: Literal["auto", "torch", "low-precision", "triton"] = "auto"
    """How nearest components are searched; all give the same answer."""

    random_state: int = 0
    """Seed of everything random; the same seed finds the same clusters."""


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


def uses_mixture(objective: ObjectiveConfig) -> bool:
    """Whether training keeps a mixture: SwAV's prototypes are learnt with the encoder, and need none."""
    return objective.cluster_loss not in ("none", "swapped")


ProtocolName = Literal["knn", "linear", "linear-paper", "semi", "transfer", "clustering", "k"]


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Measure an encoder, or a table of embeddings, the way papers do.

    SUBJECT is a run folder, timm:MODEL, timm:MODEL:WEIGHTS, torchvision:MODEL:WEIGHTS, or a table of embeddings with
    labels. Writes a folder with evaluation.json; siammm compare puts several side by side.
    """

    subject: Annotated[Positional[str], arg(metavar="SUBJECT")]
    """What is measured."""

    data: str | None = None
    """Labelled images that probes learn from and neighbours are sought in; by default those of the run."""

    test: str | None = None
    """Labelled images that judge (or a table, for a table); by default a tenth of the data is held out."""

    protocols: tuple[ProtocolName, ...] | None = None
    """What to measure; by default knn, linear, clustering and k, where they apply, and transfer if it has a set."""

    transfer: str | None = None
    """For transfer: another labelled set to learn from; a folder of VOC2007, or FOLDER::TABLE of several classes."""

    transfer_test: str | None = None
    """For transfer: the images of that set that judge; by default a tenth is held out, or VOC's own test images."""

    seeds: tuple[int, ...] = (0,)
    """Seeds of everything random in a protocol; figures are the mean and the deviation over them."""

    encoder: Literal["online", "momentum"] = "online"
    """Which encoder of a run, or of a checkpoint that holds two."""

    image_size: int | None = None
    """For models of timm and torchvision: width and height of the images that they are shown; by default their own."""

    k_means: tuple[int, ...] | None = None
    """For clustering: clusters of k-means; by default as many as classes, and 25000 too from 250,000 images on."""

    label_shares: tuple[float, ...] = (0.01, 0.1)
    """For semi: shares of the labels to fine-tune with."""

    label_lists: tuple[Path, ...] = ()
    """For semi: files that list the labelled images, a name a line, in place of shares."""

    epochs: int | None = None
    """For linear-paper, semi and transfer: epochs, in place of the published number."""

    batch_size: int | None = None
    """For the same: images in one update, in place of the published number."""

    learning_rate: float | None = None
    """For the same: base learning rate, in place of the published one."""

    output: Path | None = None
    """The folder to write; by default <name of the subject>-evaluation, here."""

    overwrite: bool = False
    """Replace an earlier evaluation in the output folder, once the new one is complete."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""

    reading: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Put evaluations side by side, mark the best, and say where figures cannot be compared."""

    evaluations: Annotated[Positional[tuple[Path, ...]], arg(metavar="EVALUATION")]
    """Files or folders that siammm evaluate wrote, or runs that were evaluated from here."""

    output: Path | None = None
    """A Markdown file to write the table to as well."""

    overwrite: bool = False
    """Replace that file if it exists."""


@dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Find the images that look mislabelled, by their clusters, their neighbours and classifiers.

    SUBJECT is a run folder that siammm train wrote, or a table of embeddings with labels. Writes a folder with all
    labelled images, the worst first (suspects.parquet), and summary.json.
    """

    subject: Annotated[Positional[Path], arg(metavar="SUBJECT")]
    """The run, or the table: a .npz, .parquet or .safetensors file, one row an image."""

    data: str | None = None
    """For a run: the labelled images; by default those it was trained on."""

    labels: Path | None = None
    """The labels, where they are kept apart: a .csv or .parquet with ids and labels, or a .npy in the images' order."""

    output: Path | None = None
    """The folder to write; by default <name of the subject>-audit, here."""

    overwrite: bool = False
    """Replace an earlier audit in the output folder, once the new one is complete."""

    key: str | None = None
    """For a table: the array or column with the embeddings; by default as in siammm cluster."""

    id_column: str | None = None
    """For a table or --labels: the array or column of ids; by default id, path or filename."""

    label_column: str | None = None
    """For a table or --labels: the array or column of labels; by default label, y, target or class."""

    mixture: Path | None = None
    """For a table: the mixture.safetensors of an earlier siammm cluster; by default clusters are found first."""

    n_neighbours: int | None = None
    """Nearest images that vote on a label; by default 200, or a twentieth of few images."""

    rounds: int = 1
    """Times that the evidence is weighed; after the first, the labels of suspects count less."""

    threshold: float = 0.5
    """Labels that are right with a lower probability than this are suspects."""

    plant: float | None = None
    """Make this share of the labels wrong first, and report how many of these are found: a check of the audit."""

    show: int = 20
    """How many of the worst to print."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""

    random_state: int = 0
    """Seed of everything random; the same seed gives the same ranking on the same machine."""

    reading: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class EmbedConfig:
    """Write the embeddings of images, with the cluster of each, as a table.

    SUBJECT is a run folder, timm:MODEL, timm:MODEL:WEIGHTS or torchvision:MODEL:WEIGHTS.
    """

    subject: Annotated[Positional[str], arg(metavar="SUBJECT")]
    """The encoder."""

    data: str | None = None
    """The images; by default those that the run was trained on."""

    output: Path | None = None
    """The file to write, .parquet, .npz or .npy; by default <name of the subject>-embeddings.parquet, here."""

    overwrite: bool = False
    """Replace that file if it exists."""

    what: Literal["embeddings", "features"] | None = None
    """Embeddings are what a run clusters, features what its backbone hands to other uses; by default embeddings for a
    run, features for other models."""

    image_size: int | None = None
    """For models of timm and torchvision: pixels of an image's side; by default their own."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""

    reading: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Show what a run found on one page: clusters, their images, the merge tree, suspect labels. Opens it.

    The page is one file that works from disk without a network. Where a set is large, more thumbnails are in a folder
    beside it.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run folder that siammm train wrote."""

    data: str | None = None
    """The images; by default those that the run was trained on."""

    output: Path | None = None
    """The file to write; by default <name of the run>-report.html, here."""

    overwrite: bool = False
    """Replace an earlier report."""

    open: bool = True
    """Open the page in a browser."""

    audit: Path | None = None
    """The folder of a siammm audit whose suspects are shown; by default <name of the run>-audit, here, if it exists."""

    evaluation: Path | None = None
    """The folder of a siammm evaluate whose figures are shown; by default <name of the run>-evaluation, here, if it
    exists."""

    compare: Path | None = None
    """Another run to put beside this one."""

    map: Literal["pca", "umap"] = "pca"
    """How the map is drawn; umap needs umap-learn."""

    max_thumbnails: int = 10_000
    """Thumbnails within the page; more go into the folder beside it."""

    thumbnail_size: int | None = None
    """Pixels of a thumbnail's longer side; by default up to 96, less where there are many."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""

    random_state: int = 0
    """Seed of what is drawn at random."""

    reading: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class ExploreConfig:
    """Serve the report on this machine, with all images and a search by picture: for sets too large for one page."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run folder that siammm train wrote."""

    data: str | None = None
    """The images; by default those that the run was trained on."""

    port: int = 8765
    """The port on 127.0.0.1; 0 is any that is free."""

    open: bool = True
    """Open the page in a browser."""

    audit: Path | None = None
    """The folder of a siammm audit whose suspects are shown; by default <name of the run>-audit, here, if it exists."""

    evaluation: Path | None = None
    """The folder of a siammm evaluate whose figures are shown; by default <name of the run>-evaluation, here, if it
    exists."""

    compare: Path | None = None
    """Another run to put beside this one."""

    map: Literal["pca", "umap"] = "pca"
    """How the map is drawn; umap needs umap-learn."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""

    random_state: int = 0
    """Seed of what is drawn at random."""

    reading: DataConfig = field(default_factory=DataConfig)


ExportFormat = Literal["encoder", "onnx", "tables"]


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Hand a run to other tools: timm and the Hugging Face hub, ONNX Runtime, and whatever reads Parquet.

    Writes a folder with the encoder (model.safetensors and config.json, for timm and SiamMM.from_pretrained),
    siammm.onnx (image in; embedding, cluster, probability and outlier score out) and tables of embeddings and clusters.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run folder that siammm train wrote."""

    output: Path | None = None
    """The folder to write; by default <name of the run>-export, here."""

    overwrite: bool = False
    """Replace an earlier export in the output folder, once the new one is complete."""

    formats: tuple[ExportFormat, ...] = ()
    """What to write: encoder, onnx, tables; by default all, ONNX where its packages are installed."""

    encoder: Literal["online", "momentum"] = "online"
    """Which of the run's two backbones timm is handed; the clusters keep the one that they were found with."""

    data: str | None = None
    """For the tables: the images; by default those that the run was trained on."""

    hub: str | None = None
    """Push the encoder to this repository of the Hugging Face hub as well, as in me/birds."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""

    reading: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Measure how fast this machine trains and clusters, in two minutes, and compare with the table in the docs.

    Nothing is downloaded: images are made up. Prints images a second, the share of the device's peak, what clustering
    costs, memory, and how long the usual runs would take.
    """

    preset: PresetName | None = None
    """The recipe to time; by default cifar, and imagenet-200 as well on a GPU."""

    batch_size: int | None = None
    """Images of a step; by default the preset's, and what fits for large images."""

    seconds: float = 100.0
    """About how long to measure in all, without compiling."""

    compile: bool | None = None
    """Compile the step; by default on a GPU."""

    output: Path | None = None
    """A JSON file to write the figures to as well."""

    overwrite: bool = False
    """Replace that file if it exists."""

    device: str = "auto"
    """Where to compute: auto, cpu, cuda, cuda:1, mps."""

    random_state: int = 0
    """Seed of the images."""


def initial_clusters(n_images: int) -> int:
    """Clusters that training starts from when nobody said: the paper's 100,000 of 1.28 million images, 8 %."""
    return max(2, min(round(0.08 * n_images), n_images // 4))


def default_n_components(n_samples: int) -> int:
    """Components to start merging from when nobody said: more than there are clusters, but not many times more.

    The paper starts from 8 % of its samples. A table of a million does not need 80,000 to find a few hundred clusters,
    and pays for every one, so the start is bounded: by 1,000, or by 4 sqrt(n_samples) where that is more (4,500 at
    ImageNet's size), because larger tables tend to hold more clusters.
    """
    start = min(0.08 * n_samples, max(1000.0, 4 * math.sqrt(n_samples)))
    return min(n_samples, max(2, round(start)))
