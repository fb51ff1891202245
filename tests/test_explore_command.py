"""``siammm explore``: how it starts and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from siammm.cli import main
from tests.report.made_runs import made_run


def explore(*arguments: object) -> int:
    return main(["explore", *map(str, arguments), "--device", "cpu", "--no-open"])


def test_what_cannot_be_served_is_said_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_run(tmp_path, n=20)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, message in (
            ([tmp_path / "nowhere", "--port", 0], "does not exist, but a run is a folder"),
            ([folder, "--port", port], f"Port {port} is in use; give another --port, or 0 for any that is free."),
            ([folder, "--port", 99_999], "--port is 99999, but ports are 0 to 65535"),
            ([folder, "--port", 0, "--data", "gone"], "gone does not exist"),
        ):
            assert explore(*arguments) == 2
            said = capsys.readouterr().err
            assert message in said
            assert said.count("\n") == 1


def test_it_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    folder = made_run(tmp_path, n=40)
    command = [sys.executable, "-m", "siammm", "explore", str(folder), "--port", "0", "--no-open", "--device", "cpu"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
        # A shell that starts the tests in the background has them ignore Ctrl-C, and all that they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        watch = threading.Timer(60, process.kill)  # should it never say where it is
        watch.start()
        try:
            address = re.compile(r"at (http://127\.0\.0\.1:\d+/[\w-]+/); stop with Ctrl-C")
            told = (address.search(line) for line in process.stdout)
            url = next(found.group(1) for found in told if found)
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.read().startswith(b"<!doctype html>")
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            watch.cancel()
            process.kill()
    assert process.returncode == 0
    assert "Stopped." in out
    assert err == ""
