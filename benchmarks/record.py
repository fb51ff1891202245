"""How a benchmark's result is kept: one Markdown file with all that is needed to run it again."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def arguments(description: str | None, **numbers: int) -> argparse.ArgumentParser:
    """A parser with a flag for each of these whole numbers, at this default, and with ``--output``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--output", type=Path, help="folder for the result (default: benchmarks/results)")
    return parser


def commit() -> str:
    """The commit that ran, and whether the files were changed since; SIAMMM_COMMIT names it where there is no git."""
    if "SIAMMM_COMMIT" in os.environ:
        return os.environ["SIAMMM_COMMIT"]
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        )
        return head.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no git here)"


def hardware() -> str:
    """CPU, threads, and GPU if there is one."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        flags = next(line for line in lines if line.startswith("flags"))
        units = [unit for unit in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {unit}" in flags]
        name += f" ({', '.join(units)})"
    except (OSError, StopIteration):
        pass
    text = f"{name}, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name()}; {text}" if torch.cuda.is_available() else text


def command() -> str:
    """The command line that was run, but for where its result went and for folders of this machine."""
    return shlex.join(["python", *(_from_here(word) for word in _without_output(sys.argv))])


def circumstances() -> dict[str, str]:
    """What a figure depends on besides its settings: the code, the machine, the libraries."""
    return {"command": command(), "commit": commit(), "hardware": hardware(), "software": software()}


def software() -> str:
    """The libraries that compute, with their versions."""
    import numpy
    import sklearn

    versions = f"Python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}, "
    return versions + f"scikit-learn {sklearn.__version__}"


def write(
    question: str,
    title: str,
    body: str,
    *,
    seeds: str,
    n: str,
    output: Path | None = None,
    measured: dict[str, str] | None = None,
) -> Path:
    """Write ``results/<date>-<question>.md`` (or into another folder) and return its path.

    ``measured`` holds the ``circumstances`` of the figures, where they were measured elsewhere than here and now.
    """
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    where = measured or circumstances()
    text = f"""# {title}

| | |
|---|---|
| command | `{where["command"]}` |
| date | {today} |
| commit | {where["commit"]} |
| seeds | {seeds} |
| n | {n} |
| hardware | {where["hardware"]} |
| software | {where["software"]} |

{body.strip()}
"""
    folder = output or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{today}-{question}.md"
    path.write_text(text)
    return path


def _without_output(arguments: list[str]) -> list[str]:
    """The command line but for where its result was to be written."""
    if "--output" not in arguments:
        return arguments
    at = arguments.index("--output")
    return arguments[:at] + arguments[at + 2 :]


def _from_here(word: str) -> str:
    """An absolute path as seen from this folder where it lies in it or beside it; elsewhere its last name."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return os.path.relpath(path) if path.is_relative_to(Path.cwd().parent) else path.name


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
