"""Many measurements of which any may fail: each in a process of its own, with a time limit, kept as soon as it is done.

    results = Sweep("step_gpu.py", output, limit=120).run([{"batch": 256}, {"batch": 512}])

The script is called again as ``python script --one '{"batch": 256}'`` and prints its result as a last line of JSON.
What comes back is appended to a file of JSON lines at once, so that a machine that goes away takes nothing with it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

import record

MARK = "RESULT "


class Sweep:
    def __init__(self, script: str, output: Path, *, limit: float, in_all: float = float("inf")) -> None:
        self.script, self.limit = Path(__file__).parent / script, limit
        self.ends = time.monotonic() + in_all
        output.mkdir(parents=True, exist_ok=True)
        self.lines = fresh(output / f"{self.script.stem}.jsonl")

    def run(self, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The result of each case, or its settings with "failed"."""
        results: list[dict[str, Any]] = []
        for case in cases:
            left = self.ends - time.monotonic()
            started = time.monotonic()
            result = {**case, "failed": "no time left"} if left < 5 else self._one(case, min(self.limit, left))
            result["took"] = round(time.monotonic() - started, 1)
            results.append(result)
            with self.lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)
        return results

    def _one(self, case: dict[str, Any], limit: float) -> dict[str, Any]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        child = subprocess.Popen(
            [sys.executable, str(self.script), "--one", json.dumps(case)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=True,
        )
        try:
            said, _ = child.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # with its loader's workers and compilers
            said, _ = child.communicate()
            return {**case, "failed": f"more than {limit:.0f} s", "said": said[-1500:]}
        found = [line for line in said.splitlines() if line.startswith(MARK)]
        if child.returncode or not found:
            return {**case, "failed": f"exit code {child.returncode}", "said": said[-3000:]}
        return {**case, **json.loads(found[-1][len(MARK) :])}


def arguments(description: str | None, *, limit: float) -> argparse.ArgumentParser:
    """The arguments that all sweeps share; ``limit`` is the default for the seconds of one case."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=record.RESULTS)
    parser.add_argument("--limit", type=float, default=limit, help="seconds that a case may take with compiling")
    parser.add_argument("--in-all", type=float, default=570.0, help="seconds that all cases may take")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    return parser


def swept(
    script: str,
    parser: argparse.ArgumentParser,
    cases: Callable[[argparse.Namespace], list[dict[str, Any]]],
    one: Callable[[dict[str, Any]], dict[str, Any]],
    variants: Collection[str] | None = None,
) -> tuple[argparse.Namespace, list[dict[str, Any]]]:
    """The arguments, and the result of every case; in a process for one case, its result, which ends the process.

    With ``variants``, cases that name others are refused before the first is run.
    """
    args = parser.parse_args()
    if args.one is not None:
        tell(one(args.one))
        raise SystemExit
    found = cases(args)
    wrong = set() if variants is None else {name for case in found for name in case["variants"]} - set(variants)
    if wrong:
        parser.error(f"no such variant: {', '.join(sorted(wrong))}; there are {', '.join(variants or ())}")
    return args, Sweep(script, args.output, limit=args.limit, in_all=args.in_all).run(found)


def tell(result: dict[str, Any]) -> None:
    """What a process of a sweep ends with."""
    print(MARK + json.dumps(result), flush=True)


def fresh(path: Path) -> Path:
    """The path, or one beside it with a number: no result is written over another."""
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate


def fresh_question(question: str, output: Path) -> str:
    """The name of a record that is not there yet."""
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    return fresh(output / f"{today}-{question}.md").stem.removeprefix(f"{today}-")
