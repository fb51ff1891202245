"""The image sets on which rules for the number of groups are developed and judged, as files that `siammm embed` reads.

    python benchmarks/group_sets.py FOLDER --packs PACKS [--fashion FILE] [--mnist FILE] [--fonts FOLDER]
    siammm embed lite --data FOLDER/SET.npz --image-size 128 --output SET-lite.npz

PACKS is the folder with the packed sets and their ``unpack.py``. Fashion-MNIST and MNIST are read as the files of their
test images (``t10k-images-idx3-ubyte``, also gzipped, with the labels beside it), letters from a folder of fonts: those
of the Debian packages in ``group_fonts.txt``, as ``apt-get download`` and ``dpkg -x`` leave them. (Glyphs of records
before 2026-11-18, 22:30, are of other fonts.)

Classes of Tiny-ImageNet with an even number are for development and those with an odd number for judging, from
different images; ``letters`` is for judging too (see ``DEVELOP`` in number_of_groups.py).

``tinytest`` (the official validation images of Tiny-ImageNet's odd classes), ``cifar100test`` (test images of the odd
classes of CIFAR-100) and the glyphs of ``FRESH_GLYPHS`` are a second family for judging, which was made after
``letters`` and ``tinyimagenet`` had been looked at. ``THIRD_GLYPHS`` were made after that family had been looked at,
and ``tinyother`` (odd classes of Tiny-ImageNet in the half of the images that no other set has) and ``FOURTH_GLYPHS``
after that. Glyphs of ``cyrillic`` are for development.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits

PER_CLASS = 50
LETTERS = "ABCDEFGHIJKLMNOPRSTUVXYZ"
LETTER_SIZE = 64
NOBODY_HAS = "\U000effff"  # is drawn as what a font draws for signs that it lacks
DEVELOP_GLYPHS = {"cyrillic": "АБВГДЕЖЗИКЛМНОПРСТУФХЦЧШЩЪЫЬЭЮЯ"}
FRESH_GLYPHS = {
    "greek": "αβγδεζηθικλμνξοπρστυφχψω",
    "numerals": "0123456789",
    "kana": "あいうえおかきくけこさしすせそたちつてとなにぬねのはひふへほまみむめもやゆよらりるれろわをん",
}
THIRD_GLYPHS = {
    "hebrew": "אבגדהוזחטיכלמנסעפצקרשת",
    "thai": "กขคฆงจฉชซฌญฎฏฐฑฒณดตถทธนบปผฝพฟภมยรลวศษสหฬอฮ",
}
FOURTH_GLYPHS = {
    "armenian": "աբգդեզէըթժիլխծկհձղճմյնշոչպջռսվտրցւփքօֆ",
    "georgian": "აბგდევზთიკლმნოპჟრსტუფქღყშჩცძწჭხჯჰ",
    "devanagari": "अआइईउऊऋएऐओऔकखगघङचछजझञटठडढणतथदधनपफबभमयरलवशषसह",
}
FRESH_IMAGES = {"tinyimagenet": "tinytest", "cifar100": "cifar100test"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--packs", type=Path, required=True)
    parser.add_argument("--fashion", type=Path, help="t10k-images-idx3-ubyte of Fashion-MNIST")
    parser.add_argument("--mnist", type=Path, help="the same of MNIST")
    parser.add_argument("--fonts", type=Path, help="a folder of .ttf and .otf files")
    parser.add_argument(
        "--per-class", type=int, default=PER_CLASS, help="images of a class of CIFAR-100 and Tiny-ImageNet"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)

    def save(name: str, images: np.ndarray, labels: np.ndarray) -> None:
        np.savez(options.folder / f"{name}.npz", images=images, labels=labels)
        print(f"{name}: {len(images):,} images of {len(np.unique(labels))} classes", flush=True)

    unpack = unpacker(options.packs)
    for name, count in (("cifar10", 4 * options.per_class), ("cifar100", options.per_class)):
        pack = unpack.read_pack(options.packs / f"{name}_train.npz")
        save(name, *first(pack["images"], pack["labels"], count))
    for name, part, parity in (("tinydev", "a", 0), ("tinyimagenet", "b", 1), ("tinyother", "a", 1)):
        pack = unpack.read_pack(options.packs / f"tinyimagenet_train_{part}.npz")
        own = pack["labels"] % 2 == parity
        save(name, *first(pack["images"][own], pack["labels"][own], options.per_class))
    pixels, target = load_digits(return_X_y=True)
    save("digits", coloured(np.asarray(pixels).reshape(-1, 8, 8) * (255 / 16)), np.asarray(target))
    for name, path in (("fashion", options.fashion), ("mnist", options.mnist)):
        if path:
            images = idx(path, 16).reshape(-1, 28, 28)
            labels = idx(path.with_name(path.name.replace("images-idx3", "labels-idx1")), 8).astype(np.int64)
            save(name, *first(coloured(images), labels, 200))
    for name in ("tinyimagenet", "cifar100"):
        pack = unpack.read_pack(options.packs / f"{name}_test.npz")
        own = pack["labels"] % 2 == 1
        save(FRESH_IMAGES[name], *first(pack["images"][own], pack["labels"][own], PER_CLASS))
    if options.fonts:
        save("letters", *letters(options.fonts))
        for name, alphabet in (DEVELOP_GLYPHS | FRESH_GLYPHS | THIRD_GLYPHS | FOURTH_GLYPHS).items():
            save(name, *glyphs(options.fonts, alphabet))


def unpacker(packs: Path):
    """The module that reads the packs, which lies beside them."""
    spec = importlib.util.spec_from_file_location("unpack", packs / "unpack.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first(images: np.ndarray, labels: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The first images of every class, in the order of the file."""
    row = np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in np.unique(labels)]))
    return images[row], labels[row]


def idx(path: Path, header: int) -> np.ndarray:
    """The bytes behind the header of one of MNIST's files, which may be gzipped."""
    content = path.read_bytes()
    return np.frombuffer(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content, np.uint8, offset=header)


def coloured(grey: np.ndarray) -> np.ndarray:
    """Grey images as three equal channels."""
    return np.repeat(grey.astype(np.uint8)[..., None], 3, axis=-1)


def letters(fonts: Path) -> tuple[np.ndarray, np.ndarray]:
    """Capital letters, each in every upright font of the folder that has it: one class per letter."""
    images: list[np.ndarray] = []
    labels: list[int] = []
    for path in sorted({*fonts.rglob("*.ttf"), *fonts.rglob("*.otf")}):
        try:
            font = ImageFont.truetype(str(path), 44)
            boxes = {font.getbbox(letter) for letter in LETTERS}
        except OSError:
            continue
        if len(boxes) < 8:  # a font without these letters draws the same box for each
            continue
        for label, letter in enumerate(LETTERS):
            images.append(drawn(letter, font))
            labels.append(label)
    return first(coloured(np.stack(images)), np.array(labels), PER_CLASS)


def drawn(letter: str, font: ImageFont.FreeTypeFont) -> np.ndarray:
    canvas = Image.new("L", (LETTER_SIZE, LETTER_SIZE))
    ImageDraw.Draw(canvas).text((LETTER_SIZE // 2, LETTER_SIZE // 2), letter, 255, font, anchor="mm")
    return np.asarray(canvas)


def glyphs(fonts: Path, alphabet: str) -> tuple[np.ndarray, np.ndarray]:
    """Each sign of the alphabet in fonts of the folder that have all of them; fonts that draw alike are taken once."""
    paths = sorted({*fonts.rglob("*.ttf"), *fonts.rglob("*.otf")})
    drawings: dict[bytes, np.ndarray] = {}
    for number in np.random.default_rng(0).permutation(len(paths)):
        try:
            font = ImageFont.truetype(str(paths[number]), 44)
            signs = np.stack([drawn(letter, font) for letter in [*alphabet, NOBODY_HAS]])
        except OSError:
            continue
        if len({sign.tobytes() for sign in signs}) > len(alphabet):  # none looks like another, or like a missing one
            drawings.setdefault(signs.tobytes(), signs[:-1])
        if len(drawings) == PER_CLASS:
            break
    images = np.concatenate(list(drawings.values()))
    return coloured(images), np.tile(np.arange(len(alphabet)), len(drawings))


if __name__ == "__main__":
    main()
