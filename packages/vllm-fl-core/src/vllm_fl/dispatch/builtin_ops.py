"""This module is kept for programs that import it. No backend is built in."""

from . import *  # noqa: F403
from . import discover_plugins as register_builtins  # noqa: F401
