"""Kept for programs that import from here. No backend is built in: plugins register their ops."""

from . import *  # noqa: F403
from . import discover_plugins as register_builtins  # noqa: F401
