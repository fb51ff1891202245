"""``python -m siammm``: the same as the ``siammm`` command."""

import sys

from siammm.cli import main

if __name__ == "__main__":
    sys.exit(main())
