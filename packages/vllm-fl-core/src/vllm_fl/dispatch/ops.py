"""Kept for plugins that import from here. `backends.base` has the base class of a backend."""

from . import *  # noqa: F403
from .backends.base import Backend as VLLMFLBackendBase  # noqa: F401
