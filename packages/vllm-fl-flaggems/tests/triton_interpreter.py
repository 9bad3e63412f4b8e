"""FlagGems's real kernels without a GPU, through Triton's interpreter.

`install()` must run before FlagGems is imported, in a process with TRITON_INTERPRET=1 and
GEMS_VENDOR=nvidia. It stands in for the parts that need a device, and closes the interpreter's gaps
that FlagGems 5.0.2's kernels fall into (Triton 3.7.1). An access outside a tensor ends the process:
run each case in a process of its own.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import math
import re
import sys
import textwrap
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter
import triton.runtime.jit as jit
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

__all__ = ["install"]

LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "pre_hook", "ir_override")


@cache
def install() -> Any:
    """Prepare Triton, import FlagGems for tensors on the CPU, and return the module."""
    _fake_device()
    _first_configuration()
    _no_launch_cache()
    _interpreted_functions_look_compiled()
    _extern_functions()
    _strided_buffers()
    _logical_operators()
    _bfloat16()
    # vLLM's CPU build has the first one for AVX-512: importing it elsewhere ends the process.
    for name in ("_C", "_moe_C", "_C_cache_ops", "vllm_flash_attn._vllm_fa3_C"):
        sys.modules[f"vllm.{name}"] = None  # type: ignore[assignment]
    import flag_gems

    # What FlagGems compares tensors' devices with.
    flag_gems.device = "cpu"
    return flag_gems


class _DeviceGuard(contextlib.AbstractContextManager[None]):
    def __init__(self, *args: Any) -> None:
        pass

    def __exit__(self, *args: Any) -> None:
        pass


def _fake_device() -> None:
    """What FlagGems asks of torch.cuda when it is imported, and at launches."""
    properties = types.SimpleNamespace(
        name="interpreter", major=8, minor=0, multi_processor_count=4, total_memory=1 << 34
    )
    answers: dict[str, Any] = {
        "get_device_name": lambda *_: "interpreter",
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: (8, 0),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "device": _DeviceGuard,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


class _Launcher:
    """A kernel behind a decorator that chooses arguments; here without a benchmark."""

    def __init__(self, kernel: Any, choose: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.kernel = kernel
        self.choose = choose
        self.arg_names = kernel.arg_names
        self.__name__ = getattr(kernel, "__name__", "kernel")

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        kwargs = {**self.choose(named), **kwargs}
        kept = {k: v for k, v in kwargs.items() if k not in LAUNCH_OPTIONS}
        return self.kernel.run(*args, grid=grid, warmup=warmup, **kept)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)


def _autotune(configs: Any, key: Any = None, **_: Any) -> Callable[[Any], _Launcher]:
    first = next(iter(configs), None)
    chosen = first.all_kwargs() if first else {}
    return lambda kernel: _Launcher(kernel, lambda named: chosen)


def _heuristics(values: dict[str, Callable[[dict[str, Any]], Any]]) -> Callable[[Any], _Launcher]:
    return lambda kernel: _Launcher(
        kernel, lambda named: {name: rule(named) for name, rule in values.items()}
    )


def _first_configuration() -> None:
    triton.autotune = triton.runtime.autotuner.autotune = _autotune
    triton.heuristics = _heuristics


def _no_launch_cache() -> None:
    """FlagGems's cache of compiled kernels has nothing to hold."""
    module: Any = types.ModuleType("flag_gems.utils.libentry")
    module.libentry = lambda: lambda kernel: kernel
    module.libtuner = _autotune
    module.LibTuner = type("LibTuner", (), {})
    module.LibEntry = type("LibEntry", (), {})
    module.libcache = {}
    sys.modules[module.__name__] = module


def _interpreted_functions_look_compiled() -> None:
    """FlagGems generates code from `JITFunction.src`."""
    compiled = jit.JITFunction

    class Meta(type(compiled)):  # type: ignore[misc]
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, InterpretedFunction) or issubclass(type(value), compiled)

    class JITFunction(compiled[jit.T], metaclass=Meta):  # type: ignore[misc, name-defined]
        pass

    jit.JITFunction = triton.runtime.JITFunction = triton.JITFunction = JITFunction

    def source(self: Any) -> str:
        text = textwrap.dedent("".join(inspect.getsourcelines(self.fn)[0]))
        found = re.search(r"^def\s+\w+\s*\(", text, re.M)
        assert found
        return text[found.start() :]

    def key(self: Any) -> str:
        return hashlib.sha256((self.fn.__module__ + source(self)).encode()).hexdigest()

    InterpretedFunction.src = property(source)
    InterpretedFunction.cache_key = property(key)
    InterpretedFunction.__globals__ = property(lambda self: self.fn.__globals__)
    InterpretedFunction.signature = property(lambda self: inspect.signature(self.fn))
    original = InterpretedFunction.__init__

    def init(self: Any, fn: Any, **kwargs: Any) -> None:
        original(self, fn, **kwargs)
        self.__module__ = fn.__module__

    InterpretedFunction.__init__ = init


def _extern_functions() -> None:
    """CUDA's libdevice in numpy."""
    import triton.language.extra.cuda.libdevice as libdevice

    def unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
        def call(x: Any, _semantic: Any = None, _builder: Any = None) -> Any:
            data = x.handle.data
            result = np.asarray(function(data.astype(np.float64))).astype(data.dtype)
            return tl.core.tensor(TensorHandle(result, x.handle.dtype), x.type)

        return call

    def power(x: Any, y: Any, _semantic: Any = None, _builder: Any = None) -> Any:
        exponent = y.handle.data if hasattr(y, "handle") else getattr(y, "value", y)
        data = x.handle.data
        result = np.power(data, np.asarray(exponent).astype(data.dtype)).astype(data.dtype)
        return tl.core.tensor(TensorHandle(result, x.handle.dtype), x.type)

    libdevice.erf = unary(np.vectorize(math.erf, otypes=[np.float64]))
    libdevice.tanh = unary(np.tanh)
    libdevice.pow = power


def _strided_buffers() -> None:
    """FlagGems's wrapper of a view, as the view itself: the interpreter copies tensors."""
    original = InterpretedFunction.run

    def unwrap(value: Any) -> Any:
        if type(value).__name__ != "StridedBuffer":
            return value
        base, offset = value.unwrap(), getattr(value, "_offset", 0)
        if not offset:
            return base
        start = base.storage_offset() + offset
        return torch.as_strided(base, tuple(value.size()), tuple(value.stride()), start)

    def run(self: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> Any:
        named = {name: unwrap(value) for name, value in kwargs.items()}
        return original(self, *map(unwrap, args), grid=grid, warmup=warmup, **named)

    InterpretedFunction.run = run


def _logical_operators() -> None:
    """`and` and `or` of blocks, element by element as the compiler has them."""

    def fold(method: str, stop: bool) -> Callable[..., Any]:
        def call(*operands: Callable[[], Any]) -> Any:
            result = operands[0]()
            for operand in operands[1:]:
                if isinstance(result, tl.tensor):
                    result = getattr(result, method)(operand())
                elif bool(result) is not stop:
                    result = operand()
            return result

        return call

    names = {ast.And: "_block_and", ast.Or: "_block_or"}
    interpreter.__dict__["_block_and"] = fold("logical_and", stop=False)
    interpreter.__dict__["_block_or"] = fold("logical_or", stop=True)

    class Transformer(interpreter.ASTTransformer):  # type: ignore[misc]
        def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
            self.generic_visit(node)
            none = ast.arguments(
                posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[]
            )
            operands: list[ast.expr] = [ast.Lambda(args=none, body=value) for value in node.values]
            name = ast.Name(id=names[type(node.op)], ctx=ast.Load())
            return ast.Call(func=name, args=operands, keywords=[])

        def visit_Assign(self, node: ast.Assign) -> Any:
            self.generic_visit(node)
            return super().visit_Assign(node)

    interpreter.FunctionRewriter.ast_transformer = Transformer()


def _bfloat16() -> None:
    """Products of bfloat16 blocks in fp32, and rounding to nearest even, as the hardware does."""
    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16:
            wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
            return TensorHandle(wide, tl.float32)
        return handle

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        return dot(self, widened(a), widened(b), d, precision, imprecise)

    interpreter.InterpreterBuilder.create_dot = create_dot
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = np.frombuffer(np.ascontiguousarray(data).tobytes(), dtype=np.uint32)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(bits.view(np.float32)), np.uint16(0x7FC0), nearest).reshape(
            np.shape(data)
        )

    interpreter._convert_float = rounded
