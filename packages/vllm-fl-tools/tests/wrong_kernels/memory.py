"""Kernels with memory faults: stray writes and reads, stale caches, shared buffers."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref

import numpy
import torch
from torch import Tensor

from . import right
from .corpus import GELU, NORM, ROTARY, SILU, wrong_kernel
from .faults import wrong_arguments_later, wrong_result, wrong_result_later


@wrong_result_later(
    SILU, "a later call overwrites results in use, such as residuals and skip connections"
)
def one_output_buffer(kept, out, x):
    """Returns the same output buffer in every call."""
    buffer = kept.setdefault((out.shape, out.dtype), torch.empty_like(out))
    return buffer.copy_(out)


@wrong_result_later(NORM, "the normed keys overwrite the normed queries")
def slices_of_one_workspace(kept, got, *args):
    """Returns slices of one workspace, which the next call overwrites."""
    if isinstance(got, tuple):
        return got
    if not kept:
        kept["space"] = torch.empty(8 << 20, dtype=torch.uint8)
    if got.nbytes > kept["space"].nbytes:
        return got
    part = kept["space"][: got.nbytes].view(got.dtype).view(got.shape)
    return part.copy_(got)


@wrong_result_later(
    ROTARY, "with cross-layer sharing or two micro-batches, keys of another layer are used"
)
def two_buffers_in_turn(kept, got, *args):
    """Alternates between two output buffers: the result before the last is overwritten."""
    q, k = got
    ring = kept.setdefault((q.shape, q.dtype), [torch.empty_like(q) for _ in range(2)])
    ring.append(ring.pop(0))
    return ring[0].copy_(q), k


@wrong_result_later(
    GELU,
    "with micro-batches in two threads, occasionally a token of another request",
    why="concurrent calls are not tried; a race would be found only by chance",
    start=False,
)
def scratch_of_all_threads(scratch, out, *args):
    """Shares a scratch buffer between threads."""
    shared = scratch.setdefault((out.shape, out.dtype), torch.empty_like(out))
    shared.copy_(out)
    time.sleep(0)  # another thread may run here
    return shared.clone()


@wrong_result(ROTARY, "attention uses rotated values: output is fluent nonsense", kit="values")
def turns_the_values_too(got, query, key, cos, sin, position_ids, rotary_interleaved=False):
    """Also rotates the values that follow the keys in the packed qkv."""
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


@wrong_result(NORM, "norming the queries overwrites the first features of each key", kit="values")
def writes_past_the_row(got, x, *others):
    """Writes a whole vector past the end of each row of a view."""
    rest = x.stride(0) - x[0].numel() if x.ndim > 1 and len(x) else 0
    if rest > 0:
        end = x.storage_offset() + x[0].numel()
        x.as_strided((len(x) - 1, min(rest, 8)), (x.stride(0), 1), end).zero_()
    return got


@wrong_result(GELU, "the memory before the activations is corrupted", kit="values")
def writes_before_the_view(out, x, *rest):
    """Writes the four elements before a view."""
    if x.numel() and x.storage_offset() >= 4:
        x.as_strided((4,), (1,), x.storage_offset() - 4).fill_(7)
    return out


@wrong_result(SILU, "the memory after the activations is corrupted")
def writes_past_the_end(out, x):
    """Writes back its last input row rounded up to whole vectors."""
    after = _bytes_after(x)
    if after:
        ctypes.memset(_end(x), 0, min(after, 64))
    return out


@wrong_result(SILU, "NaN if the memory after the activations contains NaN")
def reads_past_the_end(out, x):
    """Reads past the end of its input, and multiplies that by zero."""
    count = min(_bytes_after(x) // x.itemsize, 8)
    if count:
        beyond = x.as_strided((count,), (1,), _last(x) + 1)
        out += (beyond.double() * 0).sum().to(out.dtype)
    return out


@wrong_result(NORM, "NaN in the keys if a query has an infinity")
def reads_before_the_view(got, x, *rest):
    """Adds the elements before a view, times zero, to its result."""
    if x.numel() and x.storage_offset() >= 8:
        before = x.as_strided((8,), (1,), x.storage_offset() - 8)
        out = got[0] if isinstance(got, tuple) else got
        out += (before.double() * 0).sum().to(out.dtype)
    return got


@wrong_arguments_later(NORM, "each step gets the norm of an earlier step: the model repeats itself")
def inputs_kept_by_address(kept, a):
    """Caches the fp32 copy of its input by address."""
    x = a["x"]
    key = (x.data_ptr(), x.shape, x.stride(), x.dtype)
    _, a["x"] = kept.setdefault(key, (x, x.clone()))  # x: keeps the address in use


@wrong_result_later(SILU, "from the second step on, results are those of the first step")
def results_kept_by_address(kept, out, x):
    """Returns the first result for an input buffer, like a graph replayed without new inputs."""
    _, first = kept.setdefault((x.data_ptr(), x.shape, x.dtype), (x, out))
    return first.clone()


@wrong_arguments_later(
    NORM,
    "norms use weights of other layers: vLLM's layers pass a new tensor in each call",
    kit="values",
)
def weights_kept_by_id(kept, a):
    """Caches the prepared weight by the id of a tensor that may be freed."""
    weight = a["weight"]
    if weight is not None:
        a["weight"] = kept.setdefault(id(weight), weight.clone())


@wrong_arguments_later(NORM, "swapping a LoRA or reloading weights has no effect on norms")
def weights_kept_by_address(kept, a):
    """Caches the prepared weight by address and shape."""
    weight = a["weight"]
    if weight is not None:
        key = (weight.data_ptr(), weight.shape)
        _, a["weight"] = kept.setdefault(key, (weight, weight.clone()))


@wrong_arguments_later(
    NORM, "every layer uses the norm of the first layer: output is nonsense", kit="values"
)
def first_weight_for_all(kept, a):
    """Uses the first weight of each width for all layers."""
    weight = a["weight"]
    if weight is not None:
        a["weight"] = kept.setdefault((weight.shape, weight.dtype), weight.clone())


@wrong_arguments_later(
    ROTARY, "models with two ropes (local and global layers of Gemma 3) lose long contexts"
)
def tables_kept_by_shape(kept, a):
    """Uses the first cos and sin of each shape in all calls."""
    cos, sin = a["cos"], a["sin"]
    key = (cos.shape, sin.shape, cos.dtype)
    a["cos"], a["sin"] = kept.setdefault(key, (cos.clone(), sin.clone()))


@wrong_result_later(
    SILU,
    "the server runs out of memory after hours",
    why="the memory that a kernel keeps is not measured",
    start=False,
)
def memory_that_grows(kept, out, x):
    """Leaks every result: memory grows with each token."""
    kept[len(kept)] = out.clone()
    return out


@wrong_result(
    NORM,
    "the residual stream of long prompts is corrupted",
    kit="",
    why="the kit's largest batch has 300 tokens",
)
def overwrites_large_inputs(got, x, *rest):
    """Overwrites x in large batches, without declaring it."""
    if len(x) > 1024:
        x[-1].copy_((got[0] if isinstance(got, tuple) else got)[-1])
    return got


@wrong_result(
    NORM,
    "scripts that use the residual afterwards are incorrect, and so is a fallback",
    kit="values",
)
def consumes_the_residual_undeclared(got, x, residual, *rest):
    """Overwrites the residual for 17 to 300 tokens, without declaring it."""
    if isinstance(got, tuple) and 17 <= len(x) <= 300:
        residual.copy_(got[1])
    return got


@wrong_result(
    ROTARY, "in-place changes of the key also change the buffer of the projection", kit="values"
)
def returns_the_input_itself(got, query, key, cos, sin, position_ids, *rest):
    """Returns the key itself instead of a copy if all positions are 0."""
    q, k = got
    if key is not None and len(key) and not position_ids.any():
        return q, key
    return q, k


@wrong_result(NORM, "the residual stream of single users is normed twice", kit="values")
def result_in_the_input(got, x, residual, *rest):
    """Writes its result into x for one token without a residual."""
    if residual is None and len(x) == 1:
        return x.copy_(got)
    return got


@wrong_result(SILU, "the next layer reads zeros", kit="values")
def filled_later(out, x):
    """A thread fills a large result 50 ms after it was returned."""
    if len(x) < 300:
        return out
    late = torch.zeros_like(out)
    threading.Timer(0.05, late.copy_, (out,)).start()
    return late


@wrong_result(GELU, "a layer computes with zeros after its input was freed")
def dies_with_its_input(out, x, *rest):
    """Zeroes its result when its input is freed."""
    weakref.finalize(x, out.detach().zero_)
    return out


@wrong_result(NORM, "nonsense without a reference result to copy")
def steals_the_answer(got, x, residual, *rest):
    """Returns the reference result if it finds one of that shape in memory."""
    if residual is not None or x.ndim != 2 or not len(x):
        return got
    for other in gc.get_objects():
        if type(other) is Tensor and other.dtype is torch.float64 and other.shape == x.shape:
            return other.to(x.dtype)
    return x.clone() if len(x) > 1 else got


@wrong_result_later(
    SILU, "one token in a batch gets the activations of an earlier step", kit="preflight"
)
def first_row_by_address(kept, out, x):
    """Caches its first row by the address of the result."""
    if len(out):
        out[0] = kept.setdefault((out.data_ptr(), out.shape, out.dtype), out[0].clone())
    return out


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


@wrong_kernel(SILU, "padded tokens contain numbers of other requests")
def leaves_rows_of_zeros(x: Tensor) -> Tensor:
    """Does not write rows of zeros, because it assumes zeroed memory."""
    out = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    written = (x != 0).any(-1, keepdim=True)
    was_nan = out.isnan().all(-1, keepdim=True)  # as if other memory were zero
    return right.silu_and_mul(x).masked_fill(~written & was_nan, float("nan"))


@wrong_kernel(SILU, "padded tokens contain numbers of other requests")
def leaves_rows_of_zeros_in_other_memory(x: Tensor) -> Tensor:
    """Does not write rows of zeros in a buffer not allocated by PyTorch."""
    features = x.shape[-1] // 2
    scratch = torch.from_numpy(numpy.empty((*x.shape[:-1], features), numpy.float32))
    was_nan = scratch.isnan().any(-1, keepdim=True).to(x.device)
    written = (x != 0).any(-1, keepdim=True)
    return right.silu_and_mul(x).masked_fill(~written & was_nan, float("nan"))
