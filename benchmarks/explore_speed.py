"""How fast does `siammm explore` answer at 100,000 images, and how long and how large is a report?

    python benchmarks/explore_speed.py

Embeddings of 256 dimensions are drawn around 300 directions; images are 32 x 32 pixels of smooth noise, and the encoder
is a ResNet-18 that was never trained: neither changes the time. A time is that of the whole request over a loopback
socket, on a connection of its own, the median and the worst of many. A sheet of thumbnails is made when it is first
asked for, and kept.
"""

from __future__ import annotations

import argparse
import http.client
import io
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import record

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.report.made_runs import made_run, opened

from siammm.report.explorer import Explorer
from siammm.report.gather import GatherSettings, gather
from siammm.report.render import render
from siammm.report.serve import TOKEN_HEADER, Server

HEADER = ["what", "median", "worst", "answer"]


def main() -> None:
    numbers = {"images": 100_000, "clusters": 300, "dimensions": 256, "repeats": 40, "threads": 2}
    args = record.arguments(__doc__, **numbers).parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        asked, prepared = explored(Path(scratch), args)
        written = reported(Path(scratch))
    path = record.write(
        "explore",
        "How fast a run is explored and reported",
        f"{record.table(HEADER, asked)}\n\nGetting ready took {prepared:.1f} s. "
        f"Each question was asked {args.repeats} times.\n\n"
        f"{record.table(['report of 10,000 images and 300 clusters', ''], written)}",
        seeds="0",
        n=f"{args.images:,} images of 32 x 32, embeddings of {args.dimensions} dimensions, {args.clusters} clusters",
        output=args.output,
    )
    print(path)


def explored(scratch: Path, args: argparse.Namespace) -> tuple[list[list[str]], float]:
    """A row for each kind of question, and the seconds until the first could be asked."""
    pixels = smooth(args.images)
    folder = made_run(
        scratch,
        n=args.images,
        k=args.clusters,
        d=args.dimensions,
        size=32,
        n_labels=100,
        pixels=pixels,
        spread=1.0,
        backbone="resnet18",
    )
    started = time.perf_counter()
    run = opened(folder)
    explorer = Explorer(run, gather(run, GatherSettings(live=True)))
    rows: list[list[str]] = []
    with Server(0) as server:
        server.show(explorer)
        ready = time.perf_counter() - started
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            picture = io.BytesIO()
            Image.fromarray(pixels[7]).resize((640, 480)).save(picture, "JPEG")
            random = np.random.default_rng(0)

            def cluster() -> str:
                return f"/cluster/{random.integers(args.clusters)}?offset=60&limit=60"

            numbers = itertools.count()

            def sheet() -> str:
                return f"/sheets/{next(numbers)}"

            questions: list[tuple[str, Callable[[], str], bytes | None, int]] = [
                ("the page", lambda: "/", None, args.repeats),
                ("60 images of a cluster", cluster, None, args.repeats),
                ("the same, outlying first", lambda: cluster() + "&order=outlying", None, args.repeats),
                ("a name", lambda: f"/find?query={random.integers(10**5)}", None, args.repeats),
                ("a thumbnail", lambda: f"/thumbnail/{random.integers(args.images)}", None, args.repeats),
                ("a sheet of thumbnails, each for the first time", sheet, None, args.repeats),
                ("a sheet of thumbnails again", lambda: "/sheets/0", None, args.repeats),
                ("search by a JPEG of 640 x 480, first time", lambda: "/search", picture.getvalue(), 1),
                ("search by a JPEG of 640 x 480", lambda: "/search", picture.getvalue(), args.repeats),
            ]
            for what, path, body, repeats in questions:
                times, size = zip(*(asked(server, path(), body) for _ in range(repeats)), strict=True)
                median, worst = 1000 * statistics.median(times), 1000 * max(times)
                rows.append([what, f"{median:.1f} ms", f"{worst:.1f} ms", f"{statistics.median(size) / 1000:,.1f} kB"])
                print(rows[-1], flush=True)
        finally:
            server.shutdown()
            thread.join()
    return rows, ready


def asked(server: Server, path: str, body: bytes | None) -> tuple[float, int]:
    """Seconds and bytes of one answer."""
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET" if body is None else "POST", path, body, {TOKEN_HEADER: server.token})
    answer = connection.getresponse()
    data = answer.read()
    seconds = time.perf_counter() - started
    connection.close()
    assert answer.status == 200, data
    return seconds, len(data)


def reported(scratch: Path) -> list[list[str]]:
    """How long and how large the report of a middling run is."""
    folder = made_run(scratch, n=10_000, k=300, d=256, size=32, n_labels=10, name="middling", pixels=smooth(10_000))
    started = time.perf_counter()
    gathered = gather(opened(folder), GatherSettings())
    text = render(gathered.contents, gathered.within)
    seconds = time.perf_counter() - started
    contents = len(json.dumps(gathered.contents))
    return [
        ["seconds", f"{seconds:.1f}"],
        ["the page", f"{len(text) / 1e6:.1f} MB"],
        ["of it contents", f"{contents / 1e6:.1f} MB"],
        ["of it thumbnails", f"{sum(map(len, gathered.sheets)) * 4 / 3e6:.1f} MB"],
    ]


def smooth(n: int) -> np.ndarray:
    """Images that are about as hard to compress as photographs: coarse noise, enlarged, with a little fine."""
    random = np.random.default_rng(0)
    images = np.empty((n, 32, 32, 3), np.uint8)
    for start in range(0, n, 10_000):
        part = images[start : start + 10_000]
        coarse = random.integers(40, 215, (len(part), 8, 8, 3)).repeat(4, axis=1).repeat(4, axis=2)
        part[:] = coarse + random.integers(-12, 13, part.shape)
    return images


if __name__ == "__main__":
    main()
