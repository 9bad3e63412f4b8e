"""default.flagos without a GPU, on Triton's interpreter: a plugin module for the tests.

VLLM_FL_PLUGIN_MODULES=on_interpreter, with this folder on PYTHONPATH: every process that finds
plugins then has it. The kernels are FlagGems's own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "GEMS_VENDOR": "nvidia", "ARCH": "sm_80"}

import triton_interpreter

from vllm_fl.dispatch.types import OpImpl
from vllm_fl.hookspecs import hookimpl


@hookimpl
def register_ops() -> Iterable[OpImpl]:
    """Nothing: what the installed plugin brings finds FlagGems on the interpreter."""
    from vllm_fl_flaggems import loading

    loading._outcome[:] = [_Gems(triton_interpreter.install())]
    return ()


class _Gems:
    """FlagGems, with an error where the interpreter would read outside of the tables."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def apply_rotary_pos_emb(self, q: Any, k: Any, cos: Any, sin: Any, at: Any, *rest: Any) -> Any:
        if not all(0 <= position < len(cos) for position in at.tolist()):
            raise IndexError("a position outside the tables, which on a GPU is undefined")
        return self._module.apply_rotary_pos_emb(q, k, cos, sin, at, *rest)
