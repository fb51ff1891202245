"""A program that trains on a folder of images with a worker process, and does not expect that anything goes wrong."""

from __future__ import annotations

import sys

import siammm

SETTINGS = {"loader": "streaming", "workers": 1, "epochs": 10_000, "hidden_dim": 32, "embedding_dim": 16}

if __name__ == "__main__":
    try:
        siammm.SiamMM(preset="demo", device="cpu", settings=SETTINGS).fit(sys.argv[1])
    except BaseException as error:
        sys.last_value = error  # as Python keeps what nobody catches
        raise
