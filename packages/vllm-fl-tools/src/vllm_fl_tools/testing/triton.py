'''Triton kernels without a GPU: Triton's interpreter, with fixes for faults that affect kernels.

`TRITON_INTERPRET=1` runs a kernel in Python, program by program, on CPU tensors. Some results
differ from a GPU, and some code that compiles does not run. After `interpreted()`, kernels of a
backend can be tested against the contracts on any machine::

    """A plugin module for the tests: our kernels run without a GPU."""

    from vllm_fl import hookimpl
    from vllm_fl_tools.testing.triton import interpreted

    interpreted()  # before anything imports a kernel


    @hookimpl
    def register_ops():
        import vllm_fl_acme.impl

        vllm_fl_acme.impl.DEVICE = "cpu"  # or any switch to accept CPU tensors
        return ()

With this module as `tests/on_interpreter.py`, every process that loads plugins also loads it,
including the processes that the kit starts::

    TRITON_INTERPRET=1 VLLM_FL_PLUGIN_MODULES=on_interpreter PYTHONPATH=tests python -m pytest

Set small `sizes` in the test class, because a program of a thousand elements takes about a
millisecond, and a call of a served model has thousands of programs.

=====================================  ============================================================
the interpreter                        after `interpreted()`
=====================================  ============================================================
`and`, `or` of blocks: Python's        element by element, as compiled
fp32 to bf16: truncated                rounded to nearest even
a float argument: a Python number      a fp32 scalar with `.to`, which widens fp16 and bf16
`tl.dot` of bf16: of the bits          of the values, accumulated in fp32
float8_e4m3fn's NaN: widened to 480    NaN, in the wider dtype
arithmetic of bf16: of the bits        of the values, in fp32, rounded once
`libdevice`: an error, or None         numpy's functions; an error names a missing function
`triton.autotune`: looks for a GPU     the first configuration that is not pruned, unmeasured
a kernel is not a `JITFunction`        it is, with `src`, `cache_key` and `signature`
`torch.library.wrap_triton`: an error  the kernel itself runs; no compiler sees its launch
=====================================  ============================================================

This verifies results. It does not verify that a kernel compiles or that its programs do not race,
and measures no performance. An access outside of a tensor may end the process, so exclude such a
sample with `run = false` in the backend's `xfails.toml`.
'''

from __future__ import annotations

import ast
import contextlib
import hashlib
import inspect
import math
import os
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["SUPPORTED", "interpreted", "to_compile"]

SUPPORTED = ((3, 6), (3, 9))
"""The first and the last supported release of Triton. The interpreter of 3.6 fails with numpy 2.4
and later."""

SWITCH = "TRITON_INTERPRET"

LAUNCH_OPTIONS = frozenset(
    ("num_warps", "num_stages", "num_ctas", "maxnreg", "pre_hook", "ir_override")
)
"""Fields of a configuration that only affect the compiler."""


def interpreted(*, cuda: bool = False) -> None:
    """Make this process run Triton's kernels in the interpreter, on CPU tensors.

    Call it before a kernel is imported, because kernels that are decorated earlier are compiled or
    tuned for a GPU. It applies until the process ends. Child processes inherit TRITON_INTERPRET,
    but must call it again. A second call has no effect.

    Args:
        cuda: also replace functions of `torch.cuda` that kernel libraries call when they are
            imported or launch a kernel (name, properties, capability, count, the guard
            `torch.cuda.device`), as for one device of capability 8.0.
            `torch.cuda.is_available()` is unchanged.

    Raises:
        ImportError: Triton is not installed, or its release is not supported.
        RuntimeError: Triton was imported before, for compilation.
    """
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        _check()
    except BaseException:
        del os.environ[SWITCH]
        if before is not None:
            os.environ[SWITCH] = before
        raise
    _close_gaps()
    if cuda:
        _stand_in_for_cuda()


@contextlib.contextmanager
def to_compile(*, runs: bool = True) -> Iterator[set[str]]:
    """Collect the compilations that a GPU would need for the kernels launched in the block.

    Triton compiles a kernel again for another dtype, constant or option, for an integer that is 1,
    and if divisibility by 16 of an integer or address changes. Triton itself decides this.
    Configurations that `triton.autotune` would try or choose are not included.

    Args:
        runs: whether kernels run; if False, outputs are not written.

    Yields:
        A growing set of texts: a kernel's module and name, and its specialisation.

    Raises:
        RuntimeError: `interpreted` was not called.
    """
    if not os.environ.get(SWITCH) or not _close_gaps.cache_info().currsize:
        raise RuntimeError(
            "to_compile counts launches of the interpreter: call interpreted() first"
        )
    function: Any = _interpreter().InterpretedFunction
    original, found = function.run, set[str]()

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        _, kinds, options = _binder(self)(*args, **kwargs)
        found.add(f"{self.fn.__module__}.{self.fn.__name__} {kinds} {sorted(options.items())}")
        return original(self, *args, grid=grid, warmup=warmup, **kwargs) if runs else None

    function.run = run
    try:
        yield found
    finally:
        function.run = original


@cache
def _binder(kernel: Any) -> Any:
    """Return Triton's function: arguments of a launch -> (by name, specialisations, options)."""
    jit: Any = import_module("triton.runtime.jit")
    backend = import_module("triton.backends.compiler").BaseBackend
    left_alone = kernel.kwargs.get("do_not_specialize") or ()
    unaligned = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    parameters = [
        jit.KernelParam(
            number,
            parameter,
            number in left_alone or parameter.name in left_alone,
            number in unaligned or parameter.name in unaligned,
        )
        for number, parameter in enumerate(kernel.signature.parameters.values())
    ]
    return jit.create_function_from_signature(kernel.signature, parameters, backend)


def _check() -> None:
    """Raise if this Triton's interpreter cannot be used."""
    try:
        triton: Any = import_module("triton")
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(
            "vllm_fl_tools.testing.triton needs Triton, which is not installed: pip install "
            "triton, in the release for your torch",
            name="triton",
        ) from error
    version = str(triton.__version__)
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    first, last = SUPPORTED
    if not first <= release <= last:
        raise ImportError(
            f"vllm_fl_tools.testing.triton supports the interpreter of Triton {_text(first)} to "
            f"{_text(last)}; installed is {version}. Install one of them for these tests.",
            name="triton",
        )
    if not isinstance(triton.language.sum, _interpreter().InterpretedFunction):
        raise RuntimeError(
            "Triton was imported before interpreted() was called, so it compiles in this process. "
            f"Call interpreted() earlier, or set {SWITCH}=1 for the whole process."
        )


def _text(release: Sequence[int]) -> str:
    return ".".join(map(str, release))


def _interpreter() -> Any:
    return import_module("triton.runtime.interpreter")


@cache
def _close_gaps() -> None:
    _first_configuration()
    _interpreted_functions_look_compiled()
    _extern_functions()
    _logical_operators()
    _float_arguments()
    _small_floats()
    _wrapped_kernels_run()


class _Launcher:
    """A kernel with a decorator that chooses arguments, without a benchmark.

    Args:
        fn: the kernel, or another launcher.
        choose: arguments of a launch, by name -> additional arguments.
    """

    def __init__(self, fn: Any, choose: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.fn = fn
        self.choose = choose
        self.arg_names = fn.arg_names
        self.__name__ = getattr(fn, "__name__", "kernel")

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        kwargs = {**self.choose(named), **kwargs}
        kept = {name: value for name, value in kwargs.items() if name not in LAUNCH_OPTIONS}
        return self.fn.run(*args, grid=grid, warmup=warmup, **kept)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, **kwargs)


def _autotune(
    configs: Sequence[Any],
    key: Any = None,
    prune_configs_by: Mapping[str, Any] | None = None,
    **_: Any,
) -> Callable[[Any], _Launcher]:
    """Replacement for `triton.autotune` that chooses the first configuration."""
    prune = (prune_configs_by or {}).get("early_config_prune")

    def choose(named: dict[str, Any]) -> dict[str, Any]:
        left = list(prune(configs, named, **named)) if prune else configs
        if not left:
            return {}
        chosen: dict[str, Any] = left[0].all_kwargs()
        if getattr(left[0], "pre_hook", None) is not None:
            left[0].pre_hook({**named, **chosen})
        return chosen

    return lambda kernel: _Launcher(kernel, choose)


def _heuristics(values: Mapping[str, Callable[[dict[str, Any]], Any]]) -> Any:
    """Replacement for `triton.heuristics` that accepts a `_Launcher`."""

    def choose(named: dict[str, Any]) -> dict[str, Any]:
        chosen: dict[str, Any] = {}
        for name, rule in values.items():
            chosen[name] = rule({**named, **chosen})
        return chosen

    return lambda kernel: _Launcher(kernel, choose)


def _first_configuration() -> None:
    for name in ("triton", "triton.runtime", "triton.runtime.autotuner"):
        module: Any = import_module(name)
        module.autotune, module.heuristics = _autotune, _heuristics


def _wrapped_kernels_run() -> None:
    """Run kernels directly instead of in a graph, because PyTorch wraps only compiled kernels."""
    library: Any = import_module("torch.library")
    library.wrap_triton = lambda triton_kernel: triton_kernel


def _interpreted_functions_look_compiled() -> None:
    """Make interpreted functions `JITFunction`s, because libraries check for that and use `src`."""
    triton: Any = import_module("triton")
    jit: Any = import_module("triton.runtime.jit")
    function: Any = _interpreter().InterpretedFunction
    compiled = jit.JITFunction

    def is_one(cls: type, value: object) -> bool:
        return isinstance(value, function) or issubclass(type(value), compiled)

    meta = type("Meta", (type(compiled),), {"__instancecheck__": is_one})
    either = types.new_class("JITFunction", (compiled[jit.T],), {"metaclass": meta})
    either.__module__ = compiled.__module__
    jit.JITFunction = triton.runtime.JITFunction = triton.JITFunction = either

    def source(self: Any) -> str:
        text = textwrap.dedent("".join(inspect.getsourcelines(self.fn)[0]))
        return text[re.search(r"^def\s+\w+\s*\(", text, re.M).start() :]  # type: ignore[union-attr]

    def key(self: Any) -> str:
        return hashlib.sha256((self.fn.__module__ + source(self)).encode()).hexdigest()

    function.src = property(source)
    function.cache_key = property(key)
    function.__globals__ = property(lambda self: self.fn.__globals__)
    function.signature = property(lambda self: inspect.signature(self.fn))
    original = function.__init__

    def init(self: Any, fn: Any, **kwargs: Any) -> None:
        original(self, fn, **kwargs)
        self.__module__ = fn.__module__

    function.__init__ = init


LIBDEVICE = ("triton.language.extra.libdevice", "triton.language.extra.cuda.libdevice")
"""Modules that have these functions, for any device and for NVIDIA."""

FUNCTIONS = {
    "ceil": "ceil", "floor": "floor", "trunc": "trunc", "rint": "rint", "nearbyint": "rint",
    "abs": "abs", "sqrt": "sqrt", "exp": "exp", "exp2": "exp2", "exp10": None, "expm1": "expm1",
    "log": "log", "log2": "log2", "log10": "log10", "log1p": "log1p", "pow": "power",
    "sin": "sin", "cos": "cos", "tan": "tan", "asin": "arcsin", "acos": "arccos", "atan": "arctan",
    "atan2": "arctan2", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asinh": "arcsinh",
    "acosh": "arccosh", "atanh": "arctanh", "fmod": "fmod", "copysign": "copysign",
    "fast_expf": "exp", "fast_logf": "log", "fast_sinf": "sin", "fast_cosf": "cos",
    "fast_powf": "power", "fast_dividef": "divide", "div_rn": "divide", "sqrt_rn": "sqrt",
    "rsqrt": None, "erf": None, "erfc": None, "fma": None,
}  # fmt: skip
"""libdevice's name -> numpy's name; None for functions that `_extern_functions` defines."""


def _extern_functions() -> None:
    """Replace the functions of libdevice by numpy functions, in fp64 and rounded once."""
    np: Any = import_module("numpy")
    own = {
        "exp10": lambda x: np.power(10.0, x),
        "rsqrt": lambda x: 1.0 / np.sqrt(x),
        "erf": np.vectorize(math.erf, otypes=[np.float64]),
        "erfc": np.vectorize(math.erfc, otypes=[np.float64]),
        "fma": lambda x, y, z: x * y + z,
    }
    known = {name: getattr(np, its) if its else own[name] for name, its in FUNCTIONS.items()}
    for name in LIBDEVICE:
        module: Any = import_module(name)
        for each, value in vars(module).copy().items():
            if inspect.isfunction(value) and value.__module__ == name and each[0] != "_":
                setattr(module, each, _elementwise(each, known.get(each)))


def _elementwise(name: str, function: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return a libdevice function for the interpreter's blocks; it raises if `function` is None."""
    np: Any = import_module("numpy")
    tl: Any = import_module("triton.language")
    interpreter = _interpreter()

    def call(*operands: Any, _semantic: Any = None, _builder: Any = None) -> Any:
        if function is None:
            raise NotImplementedError(f"vllm_fl_tools.testing.triton lacks libdevice's {name!r}")
        blocks = [interpreter.interpreter_semantic.to_tensor(each, False) for each in operands]
        first = max(blocks, key=lambda block: len(block.shape))
        kind = blocks[0].dtype
        if kind not in (tl.float32, tl.float64):
            raise TypeError(f"libdevice's {name!r} supports float32 and float64, not {kind}")
        wide = [block.handle.data.astype(np.float64) for block in blocks]
        with np.errstate(all="ignore"):  # as on a device
            result = np.asarray(function(*wide)).astype(blocks[0].handle.data.dtype)
        shape = first.type.with_element_ty(kind) if first.shape else kind
        return tl.core.tensor(interpreter.TensorHandle(result, kind), shape)

    call.__name__ = name
    return call


def _logical_operators() -> None:
    """Evaluate `and` and `or` of blocks element by element, like compiled kernels."""
    interpreter, tl = _interpreter(), import_module("triton.language")

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
    # The globals of an interpreted kernel include the interpreter's names.
    vars(interpreter)["_block_and"] = fold("logical_and", stop=False)
    vars(interpreter)["_block_or"] = fold("logical_or", stop=True)
    original: Any = interpreter.ASTTransformer

    def visit_bool_op(self: Any, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        none = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        operands: list[ast.expr] = [ast.Lambda(args=none, body=value) for value in node.values]
        name = ast.Name(id=names[type(node.op)], ctx=ast.Load())
        return ast.Call(func=name, args=operands, keywords=[])

    def visit_assign(self: Any, node: ast.Assign) -> Any:
        self.generic_visit(node)
        return original.visit_Assign(self, node)

    visitors = {"visit_BoolOp": visit_bool_op, "visit_Assign": visit_assign}
    transformer = type("Transformer", (original,), visitors)
    interpreter.FunctionRewriter.ast_transformer = transformer()


def _float_arguments() -> None:
    """Convert a float argument of a kernel to a fp32 scalar, like the compiler.

    The interpreter keeps a Python number. This has no `.to`, and in an operation it gets the dtype
    of a fp16 or bf16 block.
    """
    interpreter, np = _interpreter(), import_module("numpy")
    tl = import_module("triton.language")
    convert = interpreter._implicit_cvt

    def converted(argument: Any) -> Any:
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = converted


def _small_floats() -> None:
    """Compute with bfloat16 in fp32, rounded to nearest even, like the hardware.

    The interpreter stores and computes with the integer of the bits.

    Also round to and widen from float8_e4m3fn correctly: the interpreter loses a carry into the
    exponent, and reads NaN as 480.
    """
    interpreter, np = _interpreter(), import_module("numpy")
    torch, tl = import_module("torch"), import_module("triton.language")
    handle_type: Any = interpreter.TensorHandle
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot

    def is_bits(handle: Any) -> bool:
        return bool(handle.dtype.scalar == tl.bfloat16 and handle.data.dtype == np.uint16)

    def widened(handle: Any) -> Any:
        if is_bits(handle):
            wide = (handle.data.astype(np.uint32) << 16).view(np.float32)
            return handle_type(wide, tl.float32)
        return handle

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    builder.create_dot = create_dot
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) == (tl.float32, tl.float8e4nv):
            whole = torch.tensor(np.ascontiguousarray(data)).to(torch.float8_e4m3fn)
            return whole.view(torch.uint8).numpy()
        if source == tl.float8e4nv and target in (tl.float16, tl.float32):
            eight = torch.tensor(np.ascontiguousarray(data).view(np.uint8))
            wide = eight.view(torch.float8_e4m3fn).float().numpy()
            return wide.astype(np.float16).view(np.uint16) if target == tl.float16 else wide
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = np.frombuffer(np.ascontiguousarray(data).tobytes(), dtype=np.uint32)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        nan = np.isnan(bits.view(np.float32))
        return np.where(nan, np.uint16(0x7FC0), nearest).reshape(np.shape(data))

    interpreter._convert_float = rounded

    def narrowed(result: Any) -> Any:
        data = result.data
        if data.dtype != np.bool_:
            data = rounded(data.astype(np.float32), tl.float32, tl.bfloat16, None)
        return handle_type(data, tl.bfloat16)

    def in_fp32(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, first: Any, *others: Any) -> Any:
            handles = [first, *(other for other in others if isinstance(other, handle_type))]
            if not any(map(is_bits, handles)):
                return method(self, first, *others)
            wide = (widened(x) if isinstance(x, handle_type) else x for x in (first, *others))
            return narrowed(method(self, *wide))

        return call

    # All other operators use one of the first two, with a numpy function.
    for name in ("binary_op", "unary_op", "create_clampf", "create_fma"):
        setattr(builder, name, in_fp32(getattr(builder, name)))

    def get_bf16(self: Any, value: float) -> Any:
        return narrowed(handle_type(np.array([value], dtype=np.float32), tl.float32))

    builder.get_bf16 = get_bf16


def _stand_in_for_cuda() -> None:
    """Replace functions of torch.cuda that kernel libraries call when imported and at launches."""
    cuda: Any = import_module("torch.cuda")
    properties = types.SimpleNamespace(
        name="interpreter", major=8, minor=0, multi_processor_count=4, total_memory=1 << 34
    )
    cuda.get_device_name = lambda *_: "interpreter"
    cuda.get_device_properties = lambda *_: properties
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.device = lambda *_: contextlib.nullcontext()
