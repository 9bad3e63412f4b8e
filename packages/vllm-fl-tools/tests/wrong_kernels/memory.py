"""Kernels with memory faults: stray writes and reads, stale caches, shared buffers."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from typing import Any

import numpy
import torch
from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong, wrong_kernel


@wrong(
    SILU,
    "returns the same output buffer in every call",
    "a later call overwrites results in use, such as residuals and skip connections",
)
def one_output_buffer() -> Any:
    kept: dict[Any, Tensor] = {}

    def silu_and_mul(x: Tensor) -> Tensor:
        out = right.silu_and_mul(x)
        buffer = kept.setdefault((out.shape, out.dtype), torch.empty_like(out))
        return buffer.copy_(out)

    return silu_and_mul


@wrong(
    NORM,
    "returns slices of one workspace, which the next call overwrites",
    "the normed keys overwrite the normed queries",
)
def slices_of_one_workspace() -> Any:
    space: list[Tensor] = []

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        got = right.rms_norm(x, residual, weight, epsilon, variance_size)
        if isinstance(got, tuple):
            return got
        if not space:
            space.append(torch.empty(8 << 20, dtype=torch.uint8))
        if got.nbytes > space[0].nbytes:
            return got
        part = space[0][: got.nbytes].view(got.dtype).view(got.shape)
        return part.copy_(got)

    return rms_norm


@wrong(
    ROTARY,
    "alternates between two output buffers: the result before the last is overwritten",
    "with cross-layer sharing or two micro-batches, keys of another layer are used",
)
def two_buffers_in_turn() -> Any:
    kept: dict[Any, list[Tensor]] = {}

    def rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved=False):
        q, k = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
        ring = kept.setdefault((q.shape, q.dtype), [torch.empty_like(q) for _ in range(2)])
        ring.append(ring.pop(0))
        return ring[0].copy_(q), k

    return rotary_embedding


@wrong(
    GELU,
    "shares a scratch buffer between threads",
    "with micro-batches in two threads, occasionally a token of another request",
    why="concurrent calls are not tried; a race would be found only by chance",
    start=False,
)
def scratch_of_all_threads() -> Any:
    scratch: dict[Any, Tensor] = {}

    def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
        out = right.gelu_and_mul(x, approximate)
        shared = scratch.setdefault((out.shape, out.dtype), torch.empty_like(out))
        shared.copy_(out)
        time.sleep(0)  # another thread may run here
        return shared.clone()

    return gelu_and_mul


@wrong_kernel(
    ROTARY,
    "also rotates the values that follow the keys in the packed qkv",
    "attention uses rotated values: output is fluent nonsense",
    kit="values",
)
def turns_the_values_too(query, key, cos, sin, position_ids, rotary_interleaved=False):
    got = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
    if key is None or not len(key) or key.ndim != 3:
        return got
    end = key.storage_offset() + key.shape[1] * key.stride(1)
    room = key.stride(0) - end % key.stride(0)
    behind = key.untyped_storage().nbytes() // key.itemsize - end
    needed = key.shape[1] * key.shape[2]
    if needed <= room and behind >= key.stride(0) * (len(key) - 1) + needed:
        values = key.as_strided(key.shape, key.stride(), end)
        turned, _ = right.rotary_embedding(values, None, cos, sin, position_ids, rotary_interleaved)
        values.copy_(turned)
    return got


@wrong_kernel(
    NORM,
    "writes a whole vector past the end of each row of a view",
    "norming the queries overwrites the first features of each key",
    kit="values",
)
def writes_past_the_row(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    rest = x.stride(0) - x[0].numel() if x.ndim > 1 and len(x) else 0
    if rest > 0:
        end = x.storage_offset() + x[0].numel()
        x.as_strided((len(x) - 1, min(rest, 8)), (x.stride(0), 1), end).zero_()
    return got


@wrong_kernel(
    GELU,
    "writes the four elements before a view",
    "the memory before the activations is corrupted",
    kit="values",
)
def writes_before_the_view(x: Tensor, approximate: str = "none") -> Tensor:
    out = right.gelu_and_mul(x, approximate)
    if x.numel() and x.storage_offset() >= 4:
        x.as_strided((4,), (1,), x.storage_offset() - 4).fill_(7)
    return out


@wrong_kernel(
    SILU,
    "writes back its last input row rounded up to whole vectors",
    "the memory after the activations is corrupted",
)
def writes_past_the_end(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    after = _bytes_after(x)
    if after:
        ctypes.memset(_end(x), 0, min(after, 64))
    return out


@wrong_kernel(
    SILU,
    "reads past the end of its input, and multiplies that by zero",
    "NaN if the memory after the activations contains NaN",
)
def reads_past_the_end(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    count = min(_bytes_after(x) // x.itemsize, 8)
    if count:
        beyond = x.as_strided((count,), (1,), _last(x) + 1)
        out += (beyond.double() * 0).sum().to(out.dtype)
    return out


@wrong_kernel(
    NORM,
    "adds the elements before a view, times zero, to its result",
    "NaN in the keys if a query has an infinity",
)
def reads_before_the_view(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if x.numel() and x.storage_offset() >= 8:
        before = x.as_strided((8,), (1,), x.storage_offset() - 8)
        out = got[0] if isinstance(got, tuple) else got
        out += (before.double() * 0).sum().to(out.dtype)
    return got


@wrong(
    NORM,
    "caches the fp32 copy of its input by address",
    "each step gets the norm of an earlier step: the model repeats itself",
)
def inputs_kept_by_address() -> Any:
    kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype)
        _, mine = kept.setdefault(key, (x, x.clone()))  # x: keeps the address in use
        return right.rms_norm(mine, residual, weight, epsilon, variance_size)

    return rms_norm


@wrong(
    SILU,
    "returns the first result for an input buffer, like a graph replayed without new inputs",
    "from the second step on, results are those of the first step",
)
def results_kept_by_address() -> Any:
    kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def silu_and_mul(x: Tensor) -> Tensor:
        key = (x.data_ptr(), x.shape, x.dtype)
        if key not in kept:
            kept[key] = x, right.silu_and_mul(x)
        return kept[key][1].clone()

    return silu_and_mul


@wrong(
    NORM,
    "caches the prepared weight by the id of a tensor that may be freed",
    "norms use weights of other layers: vLLM's layers pass a new tensor in each call",
    kit="values",
)
def weights_kept_by_id() -> Any:
    kept: dict[int, Tensor] = {}

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        if weight is not None:
            weight = kept.setdefault(id(weight), weight.clone())
        return right.rms_norm(x, residual, weight, epsilon, variance_size)

    return rms_norm


@wrong(
    NORM,
    "caches the prepared weight by address and shape",
    "swapping a LoRA or reloading weights has no effect on norms",
)
def weights_kept_by_address() -> Any:
    kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        if weight is not None:
            key = (weight.data_ptr(), weight.shape)
            _, weight = kept.setdefault(key, (weight, weight.clone()))
        return right.rms_norm(x, residual, weight, epsilon, variance_size)

    return rms_norm


@wrong(
    NORM,
    "uses the first weight of each width for all layers",
    "every layer uses the norm of the first layer: output is nonsense",
    kit="values",
)
def first_weight_for_all() -> Any:
    kept: dict[Any, Tensor] = {}

    def rms_norm(x, residual, weight, epsilon, variance_size=None):
        if weight is not None:
            weight = kept.setdefault((weight.shape, weight.dtype), weight.clone())
        return right.rms_norm(x, residual, weight, epsilon, variance_size)

    return rms_norm


@wrong(
    ROTARY,
    "uses the first cos and sin of each shape in all calls",
    "models with two ropes (local and global layers of Gemma 3) lose long contexts",
)
def tables_kept_by_shape() -> Any:
    kept: dict[Any, tuple[Tensor, Tensor]] = {}

    def rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved=False):
        key_of_tables = (cos.shape, sin.shape, cos.dtype)
        cos, sin = kept.setdefault(key_of_tables, (cos.clone(), sin.clone()))
        return right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)

    return rotary_embedding


@wrong(
    SILU,
    "leaks every result: memory grows with each token",
    "the server runs out of memory after hours",
    why="the memory that a kernel keeps is not measured",
    start=False,
)
def memory_that_grows() -> Any:
    kept: list[Tensor] = []

    def silu_and_mul(x: Tensor) -> Tensor:
        out = right.silu_and_mul(x)
        kept.append(out.clone())
        return out

    return silu_and_mul


@wrong_kernel(
    NORM,
    "overwrites x in large batches, without declaring it",
    "the residual stream of long prompts is corrupted",
    kit="",
    why="the kit's largest batch has 300 tokens",
)
def overwrites_large_inputs(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if len(x) > 1024:
        x[-1].copy_((got[0] if isinstance(got, tuple) else got)[-1])
    return got


@wrong_kernel(
    NORM,
    "overwrites the residual for 17 to 300 tokens, without declaring it",
    "scripts that use the residual afterwards are incorrect, and so is a fallback",
    kit="values",
)
def consumes_the_residual_undeclared(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if isinstance(got, tuple) and 17 <= len(x) <= 300:
        residual.copy_(got[1])
    return got


@wrong_kernel(
    ROTARY,
    "returns the key itself instead of a copy if all positions are 0",
    "in-place changes of the key also change the buffer of the projection",
    kit="values",
)
def returns_the_input_itself(query, key, cos, sin, position_ids, rotary_interleaved=False):
    q, k = right.rotary_embedding(query, key, cos, sin, position_ids, rotary_interleaved)
    if key is not None and len(key) and not position_ids.any():
        return q, key
    return q, k


@wrong_kernel(
    NORM,
    "writes its result into x for one token without a residual",
    "the residual stream of single users is normed twice",
    kit="values",
)
def result_in_the_input(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if residual is None and len(x) == 1:
        return x.copy_(got)
    return got


@wrong_kernel(
    SILU,
    "a thread fills a large result 50 ms after it was returned",
    "the next layer reads zeros",
    kit="values",
)
def filled_later(x: Tensor) -> Tensor:
    out = right.silu_and_mul(x)
    if len(x) < 300:
        return out
    late = torch.zeros_like(out)
    threading.Timer(0.05, late.copy_, (out,)).start()
    return late


@wrong_kernel(
    GELU,
    "zeroes its result when its input is freed",
    "a layer computes with zeros after its input was freed",
)
def dies_with_its_input(x: Tensor, approximate: str = "none") -> Tensor:
    out = right.gelu_and_mul(x, approximate)
    weakref.finalize(x, out.detach().zero_)
    return out


@wrong_kernel(
    NORM,
    "returns the reference result if it finds one of that shape in memory",
    "nonsense without a reference result to copy",
)
def steals_the_answer(x, residual, weight, epsilon, variance_size=None):
    got = right.rms_norm(x, residual, weight, epsilon, variance_size)
    if residual is not None or x.ndim != 2 or not len(x):
        return got
    for other in gc.get_objects():
        if type(other) is Tensor and other.dtype is torch.float64 and other.shape == x.shape:
            return other.to(x.dtype)
    return x.clone() if len(x) > 1 else got


@wrong(
    SILU,
    "caches its first row by the address of the result",
    "one token in a batch gets the activations of an earlier step",
    kit="preflight",
)
def first_row_by_address() -> Any:
    kept: dict[Any, Tensor] = {}

    def silu_and_mul(x: Tensor) -> Tensor:
        out = right.silu_and_mul(x)
        if len(out):
            out[0] = kept.setdefault((out.data_ptr(), out.shape, out.dtype), out[0].clone())
        return out

    return silu_and_mul


def _last(x: Tensor) -> int:
    """Offset of the last element of x in its storage."""
    steps = zip(x.shape, x.stride(), strict=True)
    return x.storage_offset() + sum((size - 1) * stride for size, stride in steps)


def _end(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() + (_last(x) + 1) * x.itemsize


def _bytes_after(x: Tensor) -> int:
    """Number of bytes in the storage of x after its last element."""
    if not x.numel():
        return 0
    return x.untyped_storage().nbytes() - (_last(x) + 1) * x.itemsize


@wrong_kernel(
    SILU,
    "does not write rows of zeros, because it assumes zeroed memory",
    "padded tokens contain numbers of other requests",
)
def leaves_rows_of_zeros(x: Tensor) -> Tensor:
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    written = (x != 0).any(-1, keepdim=True)
    was_nan = out.isnan().all(-1, keepdim=True)  # as if other memory were zero
    return right.silu_and_mul(x).masked_fill(~written & was_nan, float("nan"))


@wrong_kernel(
    SILU,
    "does not write rows of zeros in a buffer not allocated by PyTorch",
    "padded tokens contain numbers of other requests",
)
def leaves_rows_of_zeros_in_other_memory(x: Tensor) -> Tensor:
    features = x.shape[-1] // 2
    scratch = torch.from_numpy(numpy.empty((*x.shape[:-1], features), numpy.float32))
    was_nan = scratch.isnan().any(-1, keepdim=True).to(x.device)
    written = (x != 0).any(-1, keepdim=True)
    return right.silu_and_mul(x).masked_fill(~written & was_nan, float("nan"))
