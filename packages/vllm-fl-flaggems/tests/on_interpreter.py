"""default.flagos without a GPU, on Triton's interpreter: a plugin module for the tests. With
VLLM_FL_PLUGIN_MODULES=on_interpreter, and this folder on PYTHONPATH, every process that loads
plugins has it. The kernels are FlagGems's real ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

os.environ |= {"TRITON_INTERPRET": "1", "GEMS_VENDOR": "nvidia", "ARCH": "sm_80"}

import triton_interpreter

from vllm_fl import OpImpl, hookimpl


@hookimpl
def register_ops() -> Iterable[OpImpl]:
    """Provide nothing; let the installed plugin use FlagGems on the interpreter."""
    from vllm_fl_flaggems import loading
    from vllm_fl_flaggems.impl import experts

    loading.loaded[:] = [triton_interpreter.install()]
    experts.ROWS = 64  # a program costs the interpreter milliseconds
    _look_for_positions()
    _exponentials_by_name()
    return ()


@cache
def _exponentials_by_name() -> None:
    """The interpreter replaces `tl.exp`, but not a module's imported name `exp`."""
    import triton.language as tl
    from flag_gems.fused.FLA import fused_recurrent

    fused_recurrent.exp = lambda x: tl.exp(x)


def _look_for_positions() -> None:
    """Raise an error for positions outside the tables, since the interpreter ends the process for
    them. Patched at every load, because the backend may have been imported again."""
    from vllm_fl_flaggems.triton_kernels import qk_norm_rope_kernel

    rotary = sys.modules["flag_gems.fused.rotary_embedding"].apply_rotary_pos_emb_kernel
    for kernel, table, positions in ((rotary, 4, 6), (qk_norm_rope_kernel, 3, 4)):
        if not isinstance(kernel.run, partial):
            kernel.run = partial(_look, kernel.run, table, positions)


def _look(run: Any, table: int, positions: int, *args: Any, **kwargs: Any) -> Any:
    """Launch a kernel after checking its table and positions, given by argument index."""
    if not all(0 <= position < len(args[table]) for position in args[positions].tolist()):
        raise IndexError("a position outside the tables, which on a GPU is undefined")
    return run(*args, **kwargs)
