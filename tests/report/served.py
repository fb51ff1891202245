"""The real server of ``siammm explore``, for as long as a test needs it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from siammm.report.explorer import Explorer
from siammm.report.gather import GatherSettings, gather
from siammm.report.serve import Server
from siammm.runs.run import Run


@contextlib.contextmanager
def serving(run: Run) -> Iterator[Server]:
    with Server(0) as found:
        found.show(Explorer(run, gather(run, GatherSettings(live=True))))
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()
