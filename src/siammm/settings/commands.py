"""The settings of the other commands: a field and its flag are the same word, and the text under it is its help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from siammm.settings.training import DataConfig, PresetName


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
