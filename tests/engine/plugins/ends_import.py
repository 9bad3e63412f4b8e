"""Plugin whose import ends the process without an error message, like a library that aborts."""

import os

os._exit(3)
