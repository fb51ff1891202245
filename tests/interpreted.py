"""Run programs under Triton's interpreter, one after another in one process: importing torch takes longer than most.

    python tests/interpreted.py PROGRAM...

The interpreter must be switched on before Triton is imported, so no process of the tests can do this. Prints what the
programs print, before each ``program PATH`` and after it ``ended CODE``.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"
    for path in sys.argv[1:]:
        code: object = 0
        sys.stdout.write(f"program {path}\n")
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as stop:
            code = stop.code
        except Exception:
            code = traceback.format_exc()
        sys.stdout.write(f"ended {code}\n")
