"""``siammm explore``: how it starts and how it ends."""

from __future__ import annotations

import re
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from siammm.cli import main
from tests.nursery import Nursery
from tests.report.made_runs import made_run


def explore(*arguments: object) -> int:
    return main(["explore", *map(str, arguments), "--device", "cpu", "--no-open"])


def test_what_cannot_be_served_is_said_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_run(tmp_path, n=20)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, message in (
            ([tmp_path / "nowhere", "--port", 0], "does not exist; give a run folder"),
            ([folder, "--port", port], f"Port {port} is in use; give another --port, or 0 for any that is free."),
            ([folder, "--port", 99_999], "--port is 99999, but ports are 0 to 65535"),
            ([folder, "--port", 0, "--data", "gone"], "gone does not exist"),
        ):
            assert explore(*arguments) == 2
            said = capsys.readouterr().err
            assert message in said
            assert said.count("\n") == 1


def test_it_serves_until_it_is_interrupted(nursery: Nursery, tmp_path: Path) -> None:
    folder = made_run(tmp_path, n=40)
    arguments = ["explore", str(folder), "--port", "0", "--no-open", "--device", "cpu"]
    process = nursery.start(arguments, cwd=tmp_path)
    try:
        process.wait_for("stop with Ctrl-C", timeout=60)
        address = re.search(r"at (http://127\.0\.0\.1:\d+/[\w-]+/); stop with Ctrl-C", process.out)
        assert address is not None, process.out
        with urllib.request.urlopen(address.group(1), timeout=10) as answer:
            assert answer.read().startswith(b"<!doctype html>")
        process.signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
    assert "Stopped." in process.out
    assert process.out.splitlines()[-1] == f"Next: siammm report {folder}"
    assert process.err == ""
