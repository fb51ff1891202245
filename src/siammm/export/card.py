"""The model card: what was trained on what, and how it is loaded. Names are whatever a user's files are called.

A card that somebody has edited is theirs: the last line holds a digest of what we wrote, by which we know.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from pathlib import PurePath

from siammm.core.version import __version__
from siammm.export.as_timm import TimmModel
from siammm.learn.start import NO_WEIGHTS
from siammm.runs.run import Run
from siammm.runs.starting_weights import public_name

_LONGEST_NAME = 120
_SEAL = re.compile(r"\n<!-- written by siammm: ([0-9a-f]{64}) -->\n$")


def model_card(run: Run, timm_model: TimmModel | None, choice: str) -> str:
    """The text of README.md. No name is part of its YAML; in the text they are code."""
    network = run.config.network
    # The clusters may be of other images than those that the encoder was trained on.
    found = "It was trained without clusters."
    if run.has_clusters:
        in_groups = f" in {run.groups.n_groups:,} groups" if run.groups is not None and run.has_groups else ""
        found = f"It found **{run.n_clusters:,} clusters{in_groups}**."
        if run.encoder_run is not None:
            found = f"Its **{run.n_clusters:,} clusters{in_groups}** are of {_images_of(run)}."
    tags = ["siammm", "clustering", "image-feature-extraction", *(["timm"] if timm_model is not None else [])]
    yaml = [
        "# Fill in the licence, as in: license: mit",
        f"library_name: {'timm' if timm_model is not None else 'siammm'}",
        "pipeline_tag: image-feature-extraction",
        "tags:",
        *(f"- {tag}" for tag in tags),
    ]
    paragraphs = [
        "\n".join(["---", *yaml, "---"]),
        "# An image encoder and its clusters, learnt without labels",
        f"Trained by siammm {__version__} on {_images_of(run.encoder_run or run)}, at {run.view.size} x "
        f"{run.view.size} pixels, for {run.config.optimisation.epochs:,} epochs, without labels. "
        f"{_start_of(network.weights)}{found} The backbone "
        f"is {as_code(network.backbone)}, with {run.network.encoder.num_features:,} features; images are clustered in "
        f"an embedding of {network.embedding_dim:,} dimensions.",
        "Fill in: what the images show, where they come from, and under what licence this may be used.",
        *_with_timm(run.view.size, timm_model, choice),
        *([_with_siammm(run)] if run.has_clusters else []),
    ]
    text = "\n\n".join(paragraphs) + "\n"
    return f"{text}\n<!-- written by siammm: {_digest(text)} -->\n"


def _start_of(weights: str) -> str:
    """What the training started from, in which there may be labels."""
    if weights == NO_WEIGHTS:
        return ""
    return f"It started from {as_code(public_name(weights))}; see there how these weights were trained. "


def _images_of(run: Run) -> str:
    """How many images a run has, and what they are called."""
    n_images, data = run.facts.get("n_images"), data_name(run.data or run.config.data)
    size = "" if n_images is None else f"{n_images:,} images of "
    return size + ("images without a name" if data is None else as_code(data))


_WITH_SIAMMM = """\
## With siammm: clusters{and_groups}

```python
from siammm import SiamMM

model = SiamMM.from_pretrained("PATH or USER/NAME")
clusters = model.predict("a/folder/of/images"){groups}
```"""

_WITH_TIMM = """\
```python
import timm, torch

model = timm.create_model("local-dir:PATH", pretrained=True).eval()  # or "hf-hub:USER/NAME"
images = torch.zeros(1, 3, {size}, {size})  # 0 to 1, less mean, over deviation
features = model(images{repeat})
```"""


def _with_siammm(run: Run) -> str:
    if not run.has_groups:
        return _WITH_SIAMMM.format(and_groups="", groups="")
    groups = '\ngroups = model.predict_group("a/folder/of/images")'
    return _WITH_SIAMMM.format(and_groups=" and groups", groups=groups)


def _with_timm(size: int, timm_model: TimmModel | None, choice: str) -> list[str]:
    if timm_model is None:
        return ["timm has no arguments for this backbone at this size of images, so it is loaded with siammm alone."]
    times, note, repeat = timm_model.repeat, [], ""
    if times > 1:
        note = [
            f"timm has no such network for images of {size} pixels. This one is equal to it on images of "
            f"{size * times} pixels, each pixel repeated {times} times in both directions: resize images to "
            f"{size} x {size}, and repeat."
        ]
        repeat = f".repeat_interleave({times}, 2).repeat_interleave({times}, 3)"
    heading, code = f"## With timm: features of the {choice} encoder", _WITH_TIMM.format(size=size, repeat=repeat)
    return [heading, *note, code, "Mean and deviation are in `config.json`."]


def data_name(data: str | None) -> str | None:
    """What a set of images is called, without the folders of the machine that it lies on."""
    if data is None:
        return None
    scheme, _, rest = data.partition(":")
    if scheme == "torchvision" and rest:
        return f"{scheme}:{rest.partition(':')[0]}"
    return PurePath(data).name or data


def is_edited(text: str) -> bool:
    """Whether somebody has changed the card since it was written, or wrote it."""
    seal = _SEAL.search(text)
    return seal is None or seal[1] != _digest(text[: seal.start()])


def as_bytes(text: str) -> bytes:
    """A card as it was read, whatever bytes an editor left in it."""
    return text.encode("utf-8", "surrogateescape")


def _digest(text: str) -> str:
    return hashlib.sha256(as_bytes(text)).hexdigest()


def as_code(name: str) -> str:
    """A name as Markdown's code on one line, in which nothing is markup; what cannot be seen is escaped."""
    shown = "".join(_visible(letter) for letter in name)
    if len(shown) > _LONGEST_NAME:
        shown = f"{shown[: _LONGEST_NAME - 1]}…"
    longest = max((len(ticks) for ticks in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {shown} {fence}" if longest or shown != shown.strip() or not shown else f"{fence}{shown}{fence}"


def _visible(letter: str) -> str:
    # Control characters, marks of direction, separators of lines, halves of pairs: what moves or hides other letters.
    hidden = unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return letter.encode("unicode_escape").decode("ascii") if hidden else letter
