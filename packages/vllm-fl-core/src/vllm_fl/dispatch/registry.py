"""Kept for plugins that import from here: `vllm_fl.dispatch` has the registry's names."""

from functools import partial
from typing import TYPE_CHECKING

from ..older import lookup
from ..plugins.registry import *  # noqa: F403

if not TYPE_CHECKING:  # a checker sees what is written here alone
    __getattr__ = partial(lookup, module=__name__)
