"""`torch.ops.npu`: real schemas, real meta functions, and our numerics for CPU tensors."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from .calls import note
from .wheel import META, meta_source, schemas

__all__ = ["EmulationError", "define", "demand", "numerics"]

Function = Callable[..., Any]

PACKED_DTYPES = ("hifloat8", "float4_e2m1fn_x2", "float4_e1m2fn_x2", "float8_e8m0fnu", "int4")
"""torch_npu's dtypes; meta functions compare arguments with them."""

_libraries: list[torch.library.Library] = []
"""Keeps libraries alive: a collected library removes its registrations."""


class EmulationError(RuntimeError):
    """The real operator does not support this call, or our result does not match its meta
    function."""


def demand(condition: bool, name: str, what: str) -> None:
    if not condition:
        raise EmulationError(f"npu::{name}: {what}")


@functools.cache
def define() -> None:
    """Register every operator of the wheel, and its meta functions."""
    library = torch.library.Library("npu", "DEF")
    for schema in schemas():
        library.define(schema)
    _libraries.append(library)
    _register_meta()


@functools.cache
def _kernels() -> torch.library.Library:
    define()
    return torch.library.Library("npu", "IMPL", "CPU")


def numerics(name: str) -> Callable[[Function], Function]:
    """Decorator: `function` computes the operator `npu::<name>`. It takes the schema's arguments,
    with CPU tensors, and raises EmulationError for calls that the real operator's documentation
    excludes. Its results must match the wheel's meta function in number, shapes and dtypes."""

    def decorate(function: Function) -> Function:
        operator = getattr(torch.ops.npu, name).default

        @functools.wraps(function)
        def kernel(*args: Any, **kwargs: Any) -> Any:
            expected = operator(*_on_meta(args), **_on_meta(kwargs))
            result = function(*args, **kwargs)
            _compare(name, result, expected)
            note("checked", name)
            return result

        _kernels().impl(name, kernel)
        return function

    _kernels()
    return decorate


def _on_meta(tree: Any) -> Any:
    return tree_map_only(
        torch.Tensor,
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
        tree,
    )


def _compare(name: str, result: Any, expected: Any) -> None:
    got, wanted = (
        [
            (tuple(t.shape), t.dtype) if isinstance(t, torch.Tensor) else t
            for t in tree_flatten(r)[0]
        ]
        for r in (result, expected)
    )
    if got != wanted:
        raise EmulationError(f"npu::{name} returned {got}, its meta function says {wanted}")


def _register_meta() -> None:
    """Run the wheel's registrations, with stand-ins for their imports."""

    def module(name: str, **members: Any) -> ModuleType:
        made = ModuleType(name)
        made.__dict__.update(members)
        return made

    class Codes:
        def __getattr__(self, name: str) -> str:
            return name

    utils = module(
        "torch_npu.npu.utils",
        get_cann_version=lambda *args: "9.0.0",
        _is_gte_cann_version=lambda *args: True,
    )
    npu = module("torch_npu.npu", utils=utils)
    stand_ins = {
        "torch_npu": module("torch_npu", npu=npu, **{name: name for name in PACKED_DTYPES}),
        "torch_npu.utils": module("torch_npu.utils"),
        "torch_npu.utils._error_code": module(
            "torch_npu.utils._error_code", ErrCode=Codes(), ops_error=lambda code: f" [{code}]"
        ),
        "torch_npu.npu": npu,
        "torch_npu.npu.utils": utils,
        "torch_npu.npu._backends": module("torch_npu.npu._backends", get_soc_version=lambda: 224),
    }
    shadowed = {name: sys.modules.pop(name, None) for name in stand_ins}
    sys.modules.update(stand_ins)
    namespace: dict[str, Any] = {"__name__": "torch_npu.op_plugin.meta._meta_registrations"}
    try:
        exec(compile(meta_source(), META, "exec"), namespace)
    finally:
        for name, old in shadowed.items():
            del sys.modules[name]
            if old is not None:
                sys.modules[name] = old
    namespace["m_aten"]._destroy()  # otherwise they would replace torch's meta functions
    _libraries.append(namespace["m"])
