"""``python -m rotoff``: the command line of `rotoff.cli`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
