"""`python -m vllm_fl_tools.cli`: the command, if its console script is not installed."""

from __future__ import annotations

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
