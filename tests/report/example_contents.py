"""Contents of a report that never was a run: any number of clusters, images and labels, and drawn thumbnails.

The page is tested on these, so that each case (many clusters, hostile names, no labels) takes milliseconds to make.
"""

from __future__ import annotations

import dataclasses
import io
import itertools

import numpy as np
from PIL import Image, ImageDraw

from siammm.report.image_quality import OddKind
from siammm.report.schema import (
    Cluster,
    Comparison,
    Contents,
    DuplicateSet,
    Figure,
    Group,
    HowFound,
    Images,
    OddImages,
    Quality,
    Run,
    Selection,
    Suspect,
    Thumbnails,
    Tree,
)

SECTIONS = ["overview", "clusters", "classes", "tree", "quality", "suspects", "comparison"]
"""What the page of an example without groups has."""

HOSTILE = [
    '"><img src=x onerror="window.pwned=1">',
    "</script><script>window.pwned=2</script>",
    "javascript:window.pwned=3",
    "'\"` onmouseover=window.pwned=4 x='",
    "new\nline\tand\rreturn\x00",
    "\u202egnp.exe\u202c \u200f\u2066",
    "bytes \udcff\udc80",
    "=HYPERLINK('http://example.invalid')",
    "{{ 7*7 }} ${window.pwned=5} <!-- --><svg onload=window.pwned=6>",
    "\u05e9\u05dc\u05d5\u05dd " + "long" * 60,
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """What to make."""

    n_images: int = 400
    n_clusters: int = 12
    n_groups: int = 0
    """0: one level, where every cluster is its own group."""
    named: bool = False
    """Whether a person has named every other group."""
    n_splits: int = 2
    """Finer groups of each cluster in the tree."""
    n_labels: int = 6
    """0: a run without labels."""
    thumbnail: int = 24
    per_sheet: int = 256
    n_suspects: int | None = 40
    """None: labels were not audited."""
    comparison: bool = True
    evaluated: bool = True
    hostile: bool = False
    live: bool = False
    looked_at: bool = True
    """Whether there were images, so that some are found to be odd."""
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """The contents and the sheets that go into the page."""

    contents: Contents
    sheets: list[bytes]


def make(example: Example) -> Made:
    """Contents of the kind asked for, equal for equal examples."""
    draw = np.random.default_rng(example.seed)
    n, k = example.n_images, example.n_clusters
    cluster = np.concatenate([np.arange(k), draw.integers(0, k, max(0, n - k))])[:n]
    if example.n_labels:
        mistaken = draw.random(n) < 0.12
        label = np.where(mistaken, draw.integers(0, example.n_labels, n), cluster % example.n_labels)
    else:
        label = np.full(n, -1)
    centre = draw.random((k, 2))
    place = np.clip(0.1 + 0.8 * centre[cluster] + 0.03 * draw.standard_normal((n, 2)), 0, 1)
    probability = 1 - 0.5 * draw.random(n) ** 3
    outlying = draw.random(n) ** 4
    names = [_name(i, hostile=example.hostile) for i in range(n)]
    label_names = [
        HOSTILE[i % len(HOSTILE)] if example.hostile else f"class {chr(97 + i % 26)}{i // 26 or ''}"
        for i in range(example.n_labels)
    ]
    members = [np.flatnonzero(cluster == i) for i in range(k)]
    group = _groups_of(cluster, example)
    contents = Contents(
        format=1,
        title=HOSTILE[1] if example.hostile else "example",
        made="2026-11-15T12:00:00+00:00",
        version="0.1.0",
        run=_run(example, name=HOSTILE[0] if example.hostile else "example", n_clusters=k),
        label_names=label_names or None,
        curves=_curves(k, draw),
        how_found=HowFound(number="The number of clusters was found.", levels=_levels(example)),
        merge_rounds=[(float(10 + 2 * i), before, after) for i, (before, after) in enumerate(_falls(k))],
        map_method="pca",
        map_share=0.41,
        groups=_groups(members, group, label, example),
        selections=[Selection(name=HOSTILE[0] if example.hostile else "mine", images=list(range(min(5, n))))],
        clusters=[_cluster(i, members, group, label, example, draw) for i in range(k)],
        images=Images(
            id=names,
            cluster=cluster.tolist(),
            group=group.tolist(),
            probability=probability.round(4).tolist(),
            group_probability=(0.5 + probability / 2).round(4).tolist() if example.n_groups else [],
            outlier_score=outlying.round(4).tolist(),
            label=label.tolist(),
            x=place[:, 0].round(4).tolist(),
            y=place[:, 1].round(4).tolist(),
            thumbnail=[-1 if i == n - 1 else i for i in range(n)],
            position=list(range(n)) if example.live else [],
        ),
        thumbnails=_thumbnails(example),
        tree=_tree(members, label, example),
        figures=_figures(draw) if example.evaluated else [],
        suspects=_suspects(example, label, draw),
        quality=None if example.live or not example.looked_at else _quality(n),
        comparison=_comparison(example, members, draw) if example.comparison else None,
        live=example.live,
        notes=["Three images could not be read; `siammm train` names them in bad-images.csv."]
        + (HOSTILE[:2] if example.hostile else []),
    )
    sheets = [] if example.live else _sheets(example, cluster)
    return Made(contents=contents, sheets=sheets)


def _name(i: int, *, hostile: bool) -> str:
    return f"{HOSTILE[i % len(HOSTILE)]} {i}" if hostile else f"folder/image-{i:05d}.png"


def _run(example: Example, *, name: str, n_clusters: int) -> Run:
    return Run(
        name=name,
        data=HOSTILE[3] if example.hostile else "photos",
        n_images=example.n_images,
        n_clusters=n_clusters,
        n_groups=example.n_groups or n_clusters,
        has_groups=bool(example.n_groups),
        image_size=example.thumbnail,
        backbone="resnet18",
        method="siammm",
        epochs=60,
        seconds=754.0,
        random_state=0,
        settings=[("network", "backbone", "resnet18"), ("objective", "temperature", "0.1"), ("run", "data", name)],
    )


def _falls(k: int) -> list[tuple[int, int]]:
    sizes = [k]
    while len(sizes) < 9:
        sizes.append(int(sizes[-1] * 1.35) + 1)
    return list(itertools.pairwise(reversed(sizes)))


def _curves(k: int, draw: np.random.Generator) -> dict[str, list[tuple[float, float]]]:
    epochs = np.arange(1, 61, dtype=float)
    falls = _falls(k)
    found, at = [], 0
    for epoch in epochs:
        while at < len(falls) and epoch >= 10 + 2 * at:
            at += 1
        found.append(falls[at - 1][1] if at else falls[0][0])
    loss = 3 + 12 * np.exp(-epochs / 12) + 0.1 * draw.random(60)
    curves = {"n_clusters": found, "loss": loss, "instance_loss": loss * 0.7, "cluster_loss": loss * 0.3}
    curves |= {"knn": 0.9 - 0.6 * np.exp(-epochs / 15), "learning_rate": 0.3 * np.cos(epochs / 40)}
    return {
        name: [(float(e), float(v)) for e, v in zip(epochs, values, strict=True)] for name, values in curves.items()
    }


def _counts(label: np.ndarray) -> list[tuple[int, int]]:
    kinds, counts = np.unique(label[label >= 0], return_counts=True)
    return [(int(kinds[i]), int(counts[i])) for i in np.argsort(-counts, kind="stable")]


def _majority(label: np.ndarray) -> tuple[int, float | None]:
    counts = _counts(label)
    return (counts[0][0], counts[0][1] / sum(n for _, n in counts)) if counts else (-1, None)


def _group_of(i: int, example: Example) -> int:
    return i * example.n_groups // example.n_clusters if example.n_groups else i


def _groups_of(cluster: np.ndarray, example: Example) -> np.ndarray:
    """The group of each image: that of its cluster, but for every 40th, which is in the next."""
    group = np.array([_group_of(int(i), example) for i in cluster])
    if example.n_groups > 1:
        group[39::40] = (group[39::40] + 1) % example.n_groups
    return group


def _levels(example: Example) -> str:
    return f"The images form {example.n_groups} groups." if example.n_groups else "There is one level: no groups."


def _groups(members: list[np.ndarray], group: np.ndarray, label: np.ndarray, example: Example) -> list[Group]:
    groups: list[Group] = []
    for g in range(example.n_groups or example.n_clusters):
        own = [i for i in range(example.n_clusters) if _group_of(i, example) == g]
        rows = np.flatnonzero(group == g)
        name = (HOSTILE[g % len(HOSTILE)] if example.hostile else f"kind {g}") if example.named and g % 2 == 0 else ""
        most, purity = _majority(label[rows])
        turns = itertools.zip_longest(*([row for row in members[i].tolist() if group[row] == g] for i in own))
        groups.append(
            Group(
                name=name,
                size=len(rows),
                clusters=sorted(own, key=lambda i: -len(members[i])),
                n_in_clusters=sum(int((group[members[i]] == g).sum()) for i in own),
                concentration=round(30.0 + g, 4),
                foreign=0.1 if g != 1 else 0.6,
                is_catch_all=g == 1,
                central=[row for turn in turns for row in turn if row is not None][:24],
                label=most,
                purity=purity,
                label_counts=_counts(label[rows]),
            )
        )
    return groups


def _cluster(
    i: int,
    members: list[np.ndarray],
    group: np.ndarray,
    label: np.ndarray,
    example: Example,
    draw: np.random.Generator,
) -> Cluster:
    mine = members[i]
    counts = _counts(label[mine])
    most, purity = _majority(label[mine])
    others = [int(j) for j in draw.permutation(example.n_clusters)[:6] if j != i][:5]
    n_merged = 1 + i % 5
    return Cluster(
        group=_group_of(i, example),
        n_in_group=int((group[mine] == _group_of(i, example)).sum()),
        size=len(mine),
        weight=len(mine) / example.n_images,
        concentration=float(20 * np.exp(2.5 * draw.random())),
        cohesion=float(0.5 + 0.5 * draw.random()),
        foreign=None if i == 0 else 0.6 if i == 1 else 0.1,
        is_catch_all=i == 1,
        label=most,
        purity=purity,
        label_counts=counts,
        central=mine[:24].tolist(),
        boundary=mine[24:36].tolist(),
        outliers=mine[-6:].tolist() if i % 3 else [],
        sample=draw.permutation(mine)[:24].tolist(),
        by_label=[(found, mine[label[mine] == found][:12].tolist()) for found, _ in counts],
        nearest=[(j, float(0.9 - 0.1 * at)) for at, j in enumerate(others)],
        n_merged=n_merged,
        merges=[(30 - at, n_merged - 1 - at, 1) for at in range(n_merged - 1)],
    )


def _tree(members: list[np.ndarray], label: np.ndarray, example: Example) -> Tree:
    """Each cluster split into as many parts, joined again; then clusters of a group, then groups, neighbours first."""
    parts = [part for mine in members for part in np.array_split(mine, example.n_splits)]
    owner = [i for i in range(len(members)) for _ in range(example.n_splits)]
    left, right, height = [], [], []
    nodes, found = list(parts), list(owner)
    group = [_group_of(i, example) for i in owner]

    def join(a: int, b: int, cluster: int) -> int:
        left.append(a)
        right.append(b)
        nodes.append(np.concatenate([nodes[a], nodes[b]]))
        found.append(cluster)
        group.append(group[a] if group[a] == group[b] else -1)
        height.append(0.02 * len(left) + (0.5 if cluster < 0 else 0))
        return len(nodes) - 1

    tops = []
    for i in range(len(members)):
        at = i * example.n_splits
        for j in range(1, example.n_splits):
            at = join(at, i * example.n_splits + j, i)
        tops.append(at)

    def joined(tops: list[int]) -> int:
        while len(tops) > 1:
            paired = [join(a, b, -1) for a, b in zip(tops[::2], tops[1::2], strict=False)]
            tops = paired + (tops[-1:] if len(tops) % 2 else [])
        return tops[0]

    joined([joined(list(own)) for _, own in itertools.groupby(tops, key=lambda node: group[node])])
    majority = [_majority(label[rows]) for rows in nodes]
    return Tree(
        n_leaves=len(parts),
        n_clusters=len(members),
        n_groups=example.n_groups or len(members),
        left=left,
        right=right,
        height=height,
        size=[len(rows) for rows in nodes],
        cluster=found,
        group=group,
        label=[most for most, _ in majority],
        purity=[purity for _, purity in majority],
        examples=[rows[:8].tolist() for rows in nodes],
    )


def _figures(draw: np.random.Generator) -> list[Figure]:
    names = [("knn", "top1"), ("linear", "top1"), ("clustering", "mixture, train: AMI")]
    names += [("clustering", "mixture, test: AMI"), ("clustering", "mixture, test: NMI")]
    return [
        Figure(protocol=p, name=name, value=float(draw.random()), deviation=0.004 if p == "linear" else None, note=p)
        for p, name in names
    ]


def _quality(n: int) -> Quality:
    """Some sets of duplicates, and some images that are odd; none is dark."""
    rows: dict[OddKind, int] = {"blurred": 2, "dark": 0, "bright": 1, "plain": 1, "shape": 3, "size": 90}
    return Quality(
        n_images=n - 1,
        duplicates=[
            DuplicateSet(
                images=[i, *(n - 1 - 3 * i - j for j in range(1 + i % 3))],
                similarities=[1.0, *([0.97] * (1 + i % 3))],
                sizes=[(640, 480), *([(320, 240)] * (1 + i % 3))],
            )
            for i in range(min(20, n // 8))
        ],
        odd=[
            OddImages(kind=kind, images=list(range(min(count, n))), values=[0.5] * min(count, n),
                      sizes=[(64, 48)] * min(count, n))
            for kind, count in rows.items()
        ],
    )  # fmt: skip


def _suspects(example: Example, label: np.ndarray, draw: np.random.Generator) -> list[Suspect] | None:
    if example.n_suspects is None or not example.n_labels:
        return None
    rows = draw.permutation(example.n_images)[: example.n_suspects]
    return [
        Suspect(
            image=int(row),
            rank=at + 1,
            given=int(label[row]),
            proposed=int((label[row] + 1) % example.n_labels),
            group_label=-1 if at % 2 else int((label[row] + 1) % example.n_labels),
            score=float(1 - at / (2 * len(rows))),
            evidence=[("neighbours", 0.1), ("mixture", 0.25), ("linear", float(draw.random()))],
        )
        for at, row in enumerate(rows)
    ]


def _comparison(example: Example, members: list[np.ndarray], draw: np.random.Generator) -> Comparison:
    k = max(2, example.n_clusters - 2)
    return Comparison(
        name=HOSTILE[2] if example.hostile else "other",
        other=_run(example, name="other", n_clusters=k),
        curves=_curves(k, draw),
        n_shared=example.n_images,
        scores=[("adjusted_rand", 0.71), ("adjusted_mutual_information", 0.78)],
        figures=_figures(draw),
        clusters=[
            {
                "cluster": i,
                "n_shared": len(mine),
                "others": [(i % k, len(mine) - len(mine) // 4), ((i + 1) % k, len(mine) // 4)],
            }
            for i, mine in enumerate(members)
        ],
        other_sizes=[example.n_images // k + i for i in range(k)],
    )


def _thumbnails(example: Example) -> Thumbnails:
    n_sheets = -(-example.n_images // example.per_sheet)
    last = example.n_images - (n_sheets - 1) * example.per_sheet
    return Thumbnails(
        width=example.thumbnail,
        height=example.thumbnail,
        columns=16,
        per_sheet=example.per_sheet,
        media_type="image/webp",
        sheets=[
            {
                "url": f"sheets/{i}" if example.live else None,
                "n_thumbnails": example.per_sheet if i < n_sheets - 1 else last,
            }
            for i in range(n_sheets)
        ],
    )


def _sheets(example: Example, cluster: np.ndarray) -> list[bytes]:
    """A shape and a hue for each cluster, a little different in each image."""
    draw = np.random.default_rng(example.seed + 1)
    size, found = example.thumbnail, []
    for start in range(0, len(cluster), example.per_sheet):
        part = cluster[start : start + example.per_sheet]
        sheet = Image.new("RGB", (16 * size, -(-len(part) // 16) * size))
        for at, i in enumerate(part):
            sheet.paste(_shape(int(i), size, draw), ((at % 16) * size, (at // 16) * size))
        with io.BytesIO() as file:
            sheet.save(file, "WEBP", quality=80, method=0)
            found.append(file.getvalue())
    return found


def _shape(cluster: int, size: int, draw: np.random.Generator) -> Image.Image:
    hue = int(cluster * 97 % 256 + draw.integers(-8, 9)) % 256
    image = Image.new("HSV", (size, size), (hue, int(draw.integers(50, 90)), int(draw.integers(200, 250))))
    centre = size / 2 + draw.integers(-size // 10, size // 10 + 1, 2)
    colour = ((hue + 110) % 256, 170, int(draw.integers(90, 170)))
    around = (float(centre[0]), float(centre[1]), size * float(0.26 + 0.1 * draw.random()))
    pen = ImageDraw.Draw(image)
    if cluster % 4 == 0:
        pen.circle(around[:2], around[2], fill=colour)
    else:
        pen.regular_polygon(around, 3 + cluster % 5, int(draw.integers(-20, 20)), fill=colour)
    return image.convert("RGB")
