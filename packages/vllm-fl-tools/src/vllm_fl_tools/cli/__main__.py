"""`python -m vllm_fl_tools.cli`: the command, where no console script was installed."""

from __future__ import annotations

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
