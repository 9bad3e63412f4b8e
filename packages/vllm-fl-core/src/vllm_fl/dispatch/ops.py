"""This module is kept for plugins that import it. `backends.base` has the base class of a
backend."""

from . import *  # noqa: F403
from .backends.base import Backend as VLLMFLBackendBase  # noqa: F401
