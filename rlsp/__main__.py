"""`python -m rlsp`: the same app as the console script."""

from __future__ import annotations

import sys

from rlsp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
