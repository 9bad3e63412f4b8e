"""Comparison of an implementation with the oracle, for startup, `vllm-fl verify` and the kit."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from vllm_fl.contracts import OpSpec, Sample
from vllm_fl.contracts.routes import aliases
from vllm_fl.dispatch.chain import refusal
from vllm_fl.errors import AllFailedError
from vllm_fl.plugins.signatures import verdict_of
from vllm_fl.plugins.types import OpImpl
from vllm_fl.text import clean, quote

from .expected import Deviation, Expected
from .guarded import Guarded, guarded
from .layouts import enlarged, relaid
from .oracle import closed, measures, parts, wanted_of, worst

T = TypeVar("T")

LayerFactory = Callable[[OpSpec, Mapping[str, Any]], object]


REFUSED_LATE = (
    "it reports an unsupported call after writing into its arguments, which the fallback gets"
)
"""Why a late refusal is an error. The fallback would compute with changed arguments."""

COMPARING = "comparing its result raised"


BY_CHAIN = (NotImplementedError, AllFailedError)
"""Exceptions of a chain of candidates (the compiled form) for an unsupported call."""


LEANING, SAMPLES = 0.3, 5
"""A result is biased if in each of at least `SAMPLES` samples its average error exceeds `LEANING`
steps of its dtype, always in the same direction. The average error is about 0 for rounding to
nearest, and 0.5 for truncation."""

SLOPES = {"bfloat16": 2e-3, "float16": 6e-4}
"""Limits of the median, over samples, of a result's factor minus 1. For 70 correct implementations
the median was at most 1.2e-3 and 2.2e-4. Single samples with clustered values exceed the limits."""

NEARLY_ALL = 0.8


@dataclass(frozen=True)
class CallFailure:
    """Why a call has no correct result. `str` returns a full sentence.

    Args:
        status: `refused` (by `supports` or NotImplementedError); `wrong` (the result, or a write to
            memory that the call must not change); `raised`.
    """

    status: Literal["refused", "wrong", "raised"]
    reason: str
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"it is incorrect: {self.reason}" if self.status == "wrong" else self.reason


def attempt(
    did: str,
    fn: Callable[..., T],
    *args: Any,
    refuses: type[BaseException] | tuple[type[BaseException], ...] = NotImplementedError,
) -> tuple[T | None, CallFailure | None]:
    """Call third-party code and return its exceptions as values. Only a KeyboardInterrupt is
    raised.

    Args:
        did: prefix for the text of an exception, such as `it raised`.
        args: its arguments. Their devices are synchronised, so device faults are attributed to this
            call.
        refuses: exceptions that mean an unsupported call.
    """
    try:
        got = fn(*args)
        for device in {arg.device for arg in args if isinstance(arg, torch.Tensor)}:
            synchronise(device)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # plugins may raise anything, including SystemExit and panics
        if isinstance(error, refuses) and (why := refusal_reason(error)):
            return None, CallFailure("refused", why, error)
        return None, CallFailure("raised", f"{did} {quote(error)}", error)
    return got, None


Outcome = tuple[Any, CallFailure | None]


@dataclass(frozen=True)
class Comparison:
    """Comparison of one sample computed by one implementation.

    Args:
        status: `ok`; `refused` (by `supports` or NotImplementedError); `wrong` (the result, or a
            write to memory that the call must not change); `raised`.
        share: the maximum error relative to the tolerance. The limit is 1. Infinity for an
            incorrect element without a tolerance, such as an id. NaN if not compared.
        reason: why it is not `ok`, or empty.
        biases: result -> average error away from zero, in steps of its dtype. Only for correct
            samples, and results with enough elements.
        slopes: result -> factor relative to the exact result, minus 1. For the same results as
            `biases`.
    """

    op: str
    impl_id: str
    sample: str
    dtype: str
    status: Literal["ok", "refused", "wrong", "raised"]
    share: float = math.nan
    reason: str = ""
    error: BaseException | None = None
    biases: Mapping[str, float] = field(default_factory=dict, compare=False)
    slopes: Mapping[str, float] = field(default_factory=dict, compare=False)


def bias_problem(compared: Sequence[Comparison]) -> str:
    """Return how results are biased that are each within the tolerance, or an empty string. Biased
    means that all samples deviate in the same direction or by the same factor. Layers of a model
    accumulate such errors. `compared` are the samples of one implementation in one dtype."""
    for name, some in _by_result(each.biases for each in compared):
        if len(some) >= SAMPLES and (min(some) > LEANING or max(some) < -LEANING):
            return (
                f"{name} is biased: too {'small' if some[0] < 0 else 'large'} by "
                f"{abs(statistics.fmean(some)):.2f} ULP on average in all {len(some)} samples, as "
                "if not rounded to nearest. Errors are within 1 ULP, but add up over layers"
            )
    for name, some in _by_result(each.slopes for each in compared):
        middle, limit = statistics.median(some), SLOPES.get(compared[0].dtype, math.inf)
        same = sum(slope * middle > 0 for slope in some)
        if len(some) >= SAMPLES and abs(middle) > limit and same > NEARLY_ALL * len(some):
            return (
                f"{name} is biased: {1 + middle:.4f} times the reference result, on the same side "
                f"in {same} of {len(some)} samples. The tolerance of single elements hides this"
            )
    return ""


def _by_result(samples: Iterable[Mapping[str, float]]) -> Iterable[tuple[str, list[float]]]:
    found = defaultdict[str, list[float]](list)
    for each in samples:
        for name, number in each.items():
            found[name].append(number)
    return found.items()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_call(
    impl: OpImpl, spec: OpSpec, layer_for: LayerFactory | None = None
) -> Callable[..., Any]:
    """Return the implementation as a function with the contract's parameters. `layer_for` creates a
    layer for implementations that need it. If it is None, the contract's stand-in is used."""
    if not impl.needs_layer:
        return impl.fn

    def call(*args: Any) -> Any:
        values = {name: arg for name, arg in spec.named(args).items() if name in spec.from_layer}
        layer = layer_for(spec, values) if layer_for else spec.layer(**values)
        return impl.fn(layer, *spec.unprovided(args))

    return call


def contract_args(spec: OpSpec, impl: OpImpl, given: Sequence[Any]) -> tuple[Any, ...]:
    """Return a call's arguments in the contract's order. Some of them are read from the layer."""
    if not impl.needs_layer:
        return tuple(given)
    layer, rest = given[0], iter(given[1:])
    return tuple(
        spec.from_layer[name](layer) if name in spec.from_layer else next(rest)
        for name in spec.parameters
    )


def compare(
    impl: OpImpl,
    spec: OpSpec,
    sample: Sample,
    dtype: torch.dtype,
    *,
    deviation: Callable[[Any], Deviation] | None = None,
    wanted: Expected | None = None,
    layer_for: LayerFactory | None = None,
    packed: bool | None = None,
    memory: Guarded | None = None,
) -> Comparison:
    """Run one sample on guarded memory and compare the results with the oracle, on the CPU.

    Exceptions of the implementation and its `supports` are part of the result. Only a
    KeyboardInterrupt is raised.

    Args:
        sample: the arguments, on the implementation's device. They are not changed.
        deviation: computes the error of results; None to compare them with `wanted`.
        wanted: expected outputs; empty for no comparison, None to call the oracle.
        packed: whether results must be contiguous. None: they must, unless the sample's activations
            have a layout that no vLLM layer produces, because plain PyTorch often keeps the layout.
        memory: memory of an earlier call with the same shapes, to overwrite; None for new memory.
    """
    fixed = (impl.op_name, impl.impl_id, sample.name, dtype_name(dtype))
    if wanted is None:
        wanted = () if deviation else wanted_of(spec, sample)
    judged = deviation or partial(worst, wanted=wanted)
    given = spec.named(sample.args)
    poisons = not sample.enlarged  # PyTorch's products of many rows add 0 times values in gaps
    call = guarded(given, spec.by_token, poisons) if memory is None else memory.rewritten(given)
    packed = not sample.relaid if packed is None else packed
    call.remember()
    run = partial(try_call, as_call(impl, spec, layer_for), impl, spec, call.args)
    got, failure = called(run, impl, spec, call, packed=packed)
    share = math.nan
    if failure is None:
        share, failure = compared(got, lambda results: judged(closed(results, sample)))
    if failure is not None:
        return Comparison(*fixed, failure.status, share, failure.reason, failure.error)
    if sample.relaid or sample.enlarged:  # its numbers were measured in the original sample
        return Comparison(*fixed, "ok", share)
    kept = closed(got, sample)
    biases, slopes = measures(kept, wanted, "bias"), measures(kept, wanted, "slope")
    return Comparison(*fixed, "ok", share, biases=biases, slopes=slopes)


def called(
    run: Callable[[], Outcome],
    impl: OpImpl,
    spec: OpSpec,
    call: Guarded,
    *,
    looked_at: Guarded | None = None,
    packed: bool = True,
) -> Outcome:
    """Make one call and check everything except its numbers.

    Args:
        looked_at: the arguments with content that was just saved, to check their memory after the
            call; None for all. For an unsupported call, all arguments are checked.
        packed: whether results must be contiguous.

    Returns:
        (result, failure). A failure means that the call was not supported, raised, wrote to memory
            that it must not change, or returned a result with an incorrect form.
    """
    got, failure = run()
    if failure is not None:
        if failure.status == "refused" and call.disturbance(frozenset()) is not None:
            status: Literal["wrong", "raised"] = "wrong" if failure.error is None else "raised"
            failure = CallFailure(status, REFUSED_LATE, failure.error)
        return None, failure
    consumed = spec.consumed(impl.consumes, call.args)

    def look() -> str:
        shapes = spec.fake(*call.args)  # not earlier, because the call may need the memory
        problem = misplaced(got, shapes, call, consumed, packed)
        return problem or misuse(looked_at or call, consumed, impl, spec)

    problem, failure = attempt(COMPARING, look, refuses=())
    return got, CallFailure("wrong", problem) if problem else failure


def compared(got: Any, deviation: Callable[[Any], Deviation]) -> tuple[float, CallFailure | None]:
    """Compare the numbers of a result. Return (maximum error relative to the tolerance, failure).
    The error is NaN if the result cannot be compared."""
    found, failure = attempt(COMPARING, deviation, got, refuses=())
    share, problem = found or (math.nan, "")
    return share, CallFailure("wrong", problem) if problem else failure


def try_call(
    fn: Callable[..., Any], impl: OpImpl, spec: OpSpec, args: Sequence[Any], **how: Any
) -> Outcome:
    """Call `fn`, with the contract's parameters, if `supports` accepts the call."""
    failure = accept(impl, spec, args)
    return attempt("it raised", fn, *args, **how) if failure is None else (None, failure)


def accept(impl: OpImpl, spec: OpSpec, args: Sequence[Any]) -> CallFailure | None:
    """Evaluate the implementation's `supports`. Return why it does not support a call, or None."""
    verdict, failure = attempt("its supports raised", verdict_of, impl, spec, args)
    if failure is None and verdict is not True:
        failure = CallFailure("refused", refusal(verdict))
    return failure


def tried(spec: OpSpec, dtype: torch.dtype, device: torch.device) -> Iterator[Sample]:
    """Yield the contract's samples for startup, then variants with different layouts and
    more rows."""
    own = []
    for sample in spec.samples(dtype, device):
        if not sample.kit_only:
            own.append(sample)
            yield sample
    yield from relaid(spec, own)
    yield from enlarged(spec, own)


def misplaced(
    got: Any, shapes: Any, call: Guarded, consumed: Iterable[str], packed: bool = True
) -> str:
    """Return why the form of a result is incorrect, or an empty string.

    Args:
        shapes: what the contract's fake returns for the same call.
        consumed: arguments that may be overwritten and therefore returned.
        packed: whether results must be contiguous.
    """
    if isinstance(shapes, tuple) != isinstance(got, tuple) or len(parts(got)) != len(parts(shapes)):
        return f"returned {_kind(got)}, expected {_kind(shapes)}"
    own: list[torch.Tensor] = []
    for index, (mine, shape) in enumerate(zip(parts(got), parts(shapes), strict=True)):
        where = f"result {index}" if isinstance(got, tuple) else "the result"
        if shape is None or mine is None:
            if shape is not mine:
                return f"{where} is {_kind(mine)}, expected {_kind(shape)}"
            continue
        if not isinstance(mine, torch.Tensor):
            return f"{where} is {_kind(mine)}, expected a tensor"
        if odd := _oddity(mine):
            return f"{where} is {odd}, expected a plain tensor"
        if mine.layout != torch.strided:
            return f"{where} is sparse ({mine.layout})"
        if mine.shape != shape.shape:
            return f"{where} has shape {tuple(mine.shape)}, not {tuple(shape.shape)}"
        if mine.dtype != shape.dtype:
            return f"{where} has dtype {mine.dtype}, not {shape.dtype}"
        if mine.device != shape.device:
            return f"{where} is on {mine.device}, not {shape.device}"
        shared = [n for n, arg in call.arguments.items() if shares(mine, arg)]
        if set(consumed).intersection(shared):
            continue  # written in place, with the memory and layout of the argument
        if shared:
            return f"{where} shares memory with {shared[0]!r}"
        if any(shares(mine, other) for other in own):
            return "two results share memory"
        if packed and not mine.is_contiguous():
            return f"{where} has strides {mine.stride()}: the contract requires a contiguous result"
        own.append(mine)
    return ""


def _oddity(result: torch.Tensor) -> str:
    """Return why a tensor's memory does not contain its numbers. vLLM's kernels read memory."""
    if type(result) not in (torch.Tensor, torch.nn.Parameter):
        return f"a {type(result).__name__}"
    wrapped: Callable[..., bool] = torch._C._functorch.is_functorch_wrapped_tensor
    kinds = {
        "nested": result.is_nested,
        "a functional tensor": torch._is_functional_tensor(result) or wrapped(result),
        "a zero tensor without memory": result._is_zerotensor(),
        "a tensor with the negative bit": result.is_neg(),
        "a tensor with the conjugate bit": result.is_conj(),
    }
    return next((kind for kind, holds in kinds.items() if holds), "")


def misuse(call: Guarded, consumed: Iterable[str], impl: OpImpl, spec: OpSpec) -> str:
    """Return a description of memory that a call has changed but must not, or an empty string."""
    found = call.disturbance(frozenset(consumed))
    if found is None:
        return ""
    name, neighbours, count = found
    if not name:
        return f"wrote {count} elements outside its arguments, in the memory around {neighbours}"
    if name in impl.consumes:
        without = ", ".join(sorted(spec.consumed_with[name]))
        return f"overwrote {name!r}, which it may only do in calls with {without}"
    return f"overwrote {name!r}, which its consumes does not declare"


def shares(a: torch.Tensor, b: Any) -> bool:
    if not isinstance(b, torch.Tensor) or not a.numel() or not b.numel():
        return False
    return aliases(a, b)


def _kind(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    return "None" if result is None else f"a {type(result).__name__}"


def synchronise(device: torch.device) -> None:
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)
    if device.index is None or device.index == module.current_device():
        module.synchronize()  # some devices' function has no parameter
    else:
        module.synchronize(device)


def refusal_reason(error: BaseException) -> str:
    """Return why a call was not supported; empty if `error` has a different meaning. `error` is the
    NotImplementedError of an implementation, or the AllFailedError of a chain if no candidate
    supports the call (in strict mode, if the first candidate does not)."""
    causes = [c for _, c in error.causes] if isinstance(error, AllFailedError) else [error]
    if not all(isinstance(cause, str | NotImplementedError) for cause in causes):
        return ""
    return clean(str(causes[-1])) or "NotImplementedError"
