"""What does an installation weigh? The sizes on the disk of siammm's dependencies, as they are installed here.

    python benchmarks/install_size.py

The files of each package are those that its installer noted, with the bytecode that pip compiles. Packages that only
extras ask for, such as those for development, are not counted.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import record

SHOWN = 10
# What packages for NVIDIA's GPUs are called, beside torch itself.
FOR_GPUS = ("nvidia-", "cuda-", "triton")


def main() -> None:
    args = record.arguments(__doc__).parse_args()
    sizes = {name: size_of(name) for name in sorted(needed("siammm"))}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:SHOWN]
    gpu = sum(size for name, size in sizes.items() if name.startswith(FOR_GPUS))
    rows = [["all packages", f"{sum(sizes.values()) / 1e9:.1f}"], ["of these CUDA and Triton", f"{gpu / 1e9:.1f}"]]
    rows += [[name, f"{sizes[name] / 1e9:.2f}"] for name in largest]
    body = f"""{record.table(["what", "GB on the disk"], rows)}

siammm with the {len(sizes) - 1} packages that it needs, without extras, by the files that each was installed with.
"""
    n = f"{len(sizes)} packages"
    print(record.write("install-size", "What an installation weighs", body, seeds="none", n=n, output=args.output))


def needed(name: str) -> set[str]:
    """The installed packages that this one needs, and those that they need, by their normal names."""
    found: set[str] = set()
    waiting: list[tuple[str, tuple[str, ...]]] = [(name, ())]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        package, extras = waiting.pop()
        package = re.sub(r"[-_.]+", "-", package).lower()
        if (package, extras) in seen:
            continue
        seen.add((package, extras))
        found.add(package)
        for text in metadata.distribution(package).requires or []:
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                waiting.append((requirement.name, tuple(sorted(requirement.extras))))
    return found


def size_of(name: str) -> int:
    """Bytes that the files of a package take on the disk."""
    paths = [Path(str(file.locate())) for file in metadata.distribution(name).files or []]
    return sum(path.stat().st_blocks * 512 for path in paths if path.exists())


if __name__ == "__main__":
    main()
