"""What a report shows, as plain data: Python gathers it, the page draws it, and this is all that passes between them.

It is stored in the page as JSON. Every string in it may be hostile (file names, labels, paths): the page sets them as
text and never as HTML. Wherever an image is named, it is by its row in ``Images``; a label is its index in
``label_names``, and -1 where an image has none; a cluster is its index in ``clusters``, a group that in ``groups``.
Clusters and groups are two assignments of the images: those of a cluster may be in several groups.
"""

from __future__ import annotations

from typing import Literal, TypedDict

FORMAT = 1


class Run(TypedDict):
    """What was trained or clustered, and on what."""

    name: str
    data: str
    n_images: int
    n_clusters: int
    n_groups: int  # as many as clusters where there are no groups
    has_groups: bool  # whether images have groups that are not simply their clusters
    image_size: int  # 0 where a table of embeddings was clustered, whose backbone is empty
    backbone: str
    method: str
    epochs: int  # 0 where nothing was trained: the images were encoded by the backbone as it was
    seconds: float | None  # of training, where the run recorded it
    random_state: int
    settings: list[tuple[str, str, str]]  # group, name and value of every setting


class Group(TypedDict):
    """Images that belong together. Where there are no groups, every cluster is one."""

    name: str  # as a person has typed it in ``siammm explore``; empty if nobody has
    size: int  # images
    clusters: list[int]  # those that have most of their images in it, largest first
    n_in_clusters: int  # its images that are in these clusters; the others are in clusters of other groups
    concentration: float  # how near its images are to their mean direction
    foreign: float | None  # the share of its images' nearest neighbours that are in other groups; None if not known
    is_catch_all: bool  # as that of a cluster, among the groups
    central: list[int]  # its images that are most central in their clusters, of each cluster in turn
    label: int  # as those of a cluster
    purity: float | None
    label_counts: list[tuple[int, int]]


class Cluster(TypedDict):
    """One cluster. Its images are lists of rows of ``Images``, most telling first."""

    group: int  # that most of its images are in
    n_in_group: int  # how many of them
    size: int
    weight: float
    concentration: float
    cohesion: float  # mean cosine of its images with its mean direction
    foreign: float | None  # the share of its images' nearest neighbours that are in other clusters; None if not known
    is_catch_all: bool  # whether it holds what fits nowhere else: spread widely, and mixed with others
    label: int  # the label that most of its images have
    purity: float | None  # the share of its labelled images that have it
    label_counts: list[tuple[int, int]]  # labels and how many of its images have each, most frequent first
    central: list[int]
    boundary: list[int]  # those that could almost as well be in another cluster
    outliers: list[int]  # those that fit none
    sample: list[int]  # any of its images, drawn at random
    by_label: list[tuple[int, list[int]]]  # a label and some of its images here: the rows of the view by true label
    nearest: list[tuple[int, float]]  # other clusters and the cosine of their mean directions, nearest first
    n_merged: int  # how many of the components at the start of training became this one
    # epoch of training and starting components on either side of each merge that made it, the latest first
    merges: list[tuple[int, int, int]]


class HowFound(TypedDict):
    """Plain sentences."""

    number: str  # where the number of clusters comes from
    levels: str  # whether there are groups, and if not, why


class Images(TypedDict):
    """The images that the page knows, as columns. Not always the whole set."""

    id: list[str]
    cluster: list[int]
    group: list[int]
    probability: list[float]
    group_probability: list[float]  # empty without groups, and in runs of earlier versions, which did not know it
    outlier_score: list[float]
    label: list[int]
    x: list[float]  # place on the map, 0 to 1
    y: list[float]
    thumbnail: list[int]  # number of its thumbnail, counted through all sheets; -1 where it could not be made
    position: list[int]  # its place in the run, for ``image/<position>``; empty unless the page is served


class Sheet(TypedDict):
    """A picture of many thumbnails, row by row."""

    url: str | None  # where it is, relative to the page; None if the page holds it, in the element ``sheet-<number>``
    n_thumbnails: int


class Thumbnails(TypedDict):
    """How thumbnails lie in their sheets: all have one size, and all sheets but the last are full."""

    width: int
    height: int
    columns: int
    per_sheet: int
    media_type: str
    sheets: list[Sheet]


class Tree(TypedDict):
    """Found clusters joined up to one, and split down to finer parts, as a binary tree.

    Nodes 0 to n_leaves - 1 are the finest parts; node n_leaves + i joins ``left[i]`` and ``right[i]``. Joins are in
    order: undoing the last K - 1 gives K parts. Undoing n_groups - 1 gives the clusters of each group, joined, and
    undoing n_clusters - 1 the clusters that were found, so that the joins before those are splits of single clusters,
    found in the final embeddings, not by training. The tree is of clusters: a group may have images elsewhere too.
    """

    n_leaves: int
    n_clusters: int
    n_groups: int  # that have clusters
    left: list[int]
    right: list[int]
    height: list[float]  # of each join; they never fall
    size: list[int]  # images of each node, leaves first
    cluster: list[int]  # the found cluster that a node is part of; -1 for a node that joins several
    group: list[int]  # the group that most images of each of its clusters are in; -1 where these are several
    label: list[int]
    purity: list[float | None]
    examples: list[list[int]]  # a few images of each node, most central first


class Figure(TypedDict):
    """One figure of an evaluation."""

    protocol: str
    name: str
    value: float
    deviation: float | None
    note: str


class DuplicateSet(TypedDict):
    """Images that are nearly the same, by their embeddings and by what they look like when small; the largest first."""

    images: list[int]
    similarities: list[float]  # cosine with the first
    sizes: list[tuple[int, int]]  # width and height


class OddImages(TypedDict):
    """Images that are odd in one way, the oddest first."""

    kind: Literal["blurred", "dark", "bright", "plain", "shape", "size"]
    images: list[int]
    values: list[float]  # what was measured
    sizes: list[tuple[int, int]]


class Quality(TypedDict):
    """Images that somebody should look at, among those of the page."""

    n_images: int  # that were looked at
    duplicates: list[DuplicateSet]
    odd: list[OddImages]


class Selection(TypedDict):
    """Images that a person has selected and named in ``siammm explore``."""

    name: str
    images: list[int]


class Suspect(TypedDict):
    """An image whose label looks wrong."""

    image: int
    rank: int
    given: int
    proposed: int
    group_label: int  # the commonest label of its group, where that is another than the given one; else -1
    score: float  # how likely the label is wrong, 0 to 1
    evidence: list[tuple[str, float]]  # name of each witness, and the probability that it gives the given label


class Matching(TypedDict):
    """A cluster of this run and where its images are in the other."""

    cluster: int
    n_shared: int  # its images that the other run has too
    others: list[tuple[int, int]]  # the other run's clusters and how many images they share, most first; a few of them


class Comparison(TypedDict):
    """This run beside another one."""

    name: str
    other: Run
    curves: dict[str, list[tuple[float, float]]]
    n_shared: int  # images that are in both, by their names; 0 if the runs are of other images
    scores: list[tuple[str, float]]  # how alike the two clusterings of the shared images are: name and value
    figures: list[Figure]  # the other's evaluation
    clusters: list[Matching]
    other_sizes: list[int]  # images of each cluster of the other run


class Contents(TypedDict):
    """Everything on the page."""

    format: int
    title: str
    made: str  # when, as ISO 8601
    version: str
    run: Run
    label_names: list[str] | None
    curves: dict[str, list[tuple[float, float]]]  # epoch and value of each metric in training: loss, knn ...
    merge_rounds: list[tuple[float, int, int]]  # epoch, clusters before and after of each round that merged some
    how_found: HowFound
    map_method: Literal["pca", "umap"]
    map_share: float | None  # the share of the variance that the map shows, for PCA
    groups: list[Group]
    selections: list[Selection]
    clusters: list[Cluster]
    images: Images
    thumbnails: Thumbnails
    tree: Tree | None
    figures: list[Figure]
    suspects: list[Suspect] | None  # None where labels were not audited
    quality: Quality | None  # None where there are no images, and where the page is served, which asks for it
    comparison: Comparison | None
    live: bool  # whether ``siammm explore`` serves the page, so that more can be asked of it
    notes: list[str]  # what a reader should know: unreadable images, missing figures and the command for them


# What ``siammm explore`` answers, beside the page itself; all paths are relative to it. Errors are {"error": sentence}.
# ``GET quality`` answers with a ``Quality``.


class Neighbour(TypedDict):
    """An image like the one that was asked about."""

    position: int  # its place in the run, for ``thumbnail/<position>``; images that the page does not know have one too
    id: str
    cluster: int
    group: int
    label: int
    similarity: float


class Search(TypedDict):
    """``POST search``, with a picture file as its body and the page's token as X-Siammm-Token.

    ``GET similar/<position>``: the same for an image of the run, which is not among its own neighbours.
    ``GET image/<position>``: that image itself, at its full size.
    """

    id: str  # the name of the image of the run; empty for a picture that was sent
    group: int
    clusters: list[tuple[int, float]]  # likely clusters and their probabilities, most likely first
    outlier_score: float
    neighbours: list[Neighbour]


class Naming(TypedDict):
    """``POST group/<index>/name``, with {"name": text} as its body and the page's token: the name as it is kept.

    An empty text takes the name away.
    """

    name: str


class Keeping(TypedDict):
    """``POST selection``, with {"name": text, "images": positions} as its body and the page's token: all that are kept.

    No images take the selection of that name away.
    """

    selections: list[Selection]


class ImagePage(TypedDict):
    """Some images, at most 500 at once, and how many there are; ``similarity`` is that with the cluster's mean.

    ``GET cluster/<index>?offset=0&limit=60&order=central|outlying``: the images of a cluster.
    ``GET group/<index>?offset=0&limit=60&order=central|outlying``: the images of a group.
    ``GET find?query=text&limit=60``: images whose names contain the text, in any case.
    """

    total: int
    images: list[Neighbour]
