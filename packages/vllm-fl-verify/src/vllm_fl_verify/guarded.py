"""Arguments on guarded memory, to detect writes outside their views or to an argument.

Each storage is copied between two guards. Guards and gaps of strided views contain NaN (0 in
integers), so a kernel that reads them computes NaN.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

BLOCKS = 4
"""Number of blocks of each size that `freed_nan` frees: as many as an allocator may keep."""

GUARD = 256
"""Number of guard elements before and after each storage.

The number is a multiple of all usual alignments.
"""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class _Storage:
    memory: torch.Tensor
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    before: torch.Tensor = field(init=False)

    def poison(self) -> None:
        uncovered = torch.ones_like(self.memory, dtype=torch.bool)
        for view in self.views.values():
            _same_place(view, uncovered).fill_(False)
        poison = bits(torch.full((), _poison(self.memory.dtype), dtype=self.memory.dtype))
        bits(self.memory).masked_fill_(uncovered, poison.item())  # some dtypes have no fill

    def remember(self) -> None:
        self.before = bits(self.memory).clone()

    def restore(self, consumed: Collection[str]) -> None:
        """Restore the content of these arguments. Writes outside them are kept, to be detected."""
        for name in consumed:
            if name in self.views:
                now = _same_place(self.views[name], bits(self.memory))
                now.copy_(_same_place(self.views[name], self.before))

    def disturbance(self, consumed: Collection[str]) -> tuple[str, int] | None:
        now = bits(self.memory)
        if torch.equal(words(now), words(self.before)):
            return None
        changed = now != self.before
        for name in consumed:
            if name in self.views:
                _same_place(self.views[name], changed).fill_(False)
        if not bool(changed.any()):
            return None
        count = int(changed.sum())
        for name, view in self.views.items():
            if name not in consumed and bool(_same_place(view, changed).any()):
                return name, count
        return "", count


@dataclass(frozen=True)
class Guarded:
    arguments: Mapping[str, Any]
    storages: Sequence[_Storage]

    @property
    def args(self) -> tuple[Any, ...]:
        return tuple(self.arguments.values())

    def rewritten(self, arguments: Mapping[str, Any]) -> Guarded:
        """Return the call with the numbers of another call of equal shapes, in the same memory."""
        for name, mine in self.arguments.items():
            if isinstance(mine, torch.Tensor):
                mine.copy_(arguments[name])
        return Guarded(handed_over(self.arguments), self.storages)

    @property
    def nbytes(self) -> int:
        return sum(storage.memory.nbytes for storage in self.storages)

    def below(self, most: int) -> Guarded:
        """Return the call with storages of at most `most` bytes. Writes to larger ones are not
        detected."""
        kept = [storage for storage in self.storages if storage.memory.nbytes <= most]
        return Guarded(self.arguments, kept)

    def remember(self) -> None:
        for storage in self.storages:
            storage.remember()

    def restore(self, consumed: Collection[str]) -> None:
        for storage in self.storages:
            storage.restore(consumed)

    def disturbance(self, consumed: Collection[str]) -> tuple[str, str, int] | None:
        """Return what a call has changed but must not, except for `consumed` arguments.

        Returns:
            (overwritten argument or empty, arguments in that storage, number of elements), or None.
        """
        for storage in self.storages:
            found = storage.disturbance(consumed)
            if found is not None:
                return found[0], " and ".join(repr(name) for name in storage.views), found[1]
        return None


def guarded(
    arguments: Mapping[str, Any], by_token: Collection[str] = (), poisons: bool = True
) -> Guarded:
    """Copy arguments to guarded memory. Views keep their strides and shared storages.

    Args:
        arguments: parameter -> argument, in the contract's order.
        by_token: the activations. Other tensors (weights, tables) are created outside inference
            mode, like a model's weights.
        poisons: whether to fill gaps of strided views with NaN. If not, the gaps are copied.
    """
    storages: dict[int, _Storage] = {}
    of_tokens = map(arguments.get, by_token)
    activations = {x.untyped_storage().data_ptr() for x in of_tokens if isinstance(x, torch.Tensor)}
    laid: dict[str, Any] = {}
    for name, arg in arguments.items():
        if not isinstance(arg, torch.Tensor):
            laid[name] = arg
            continue
        place = arg.untyped_storage().data_ptr()
        weights = place not in activations
        with torch.inference_mode(False) if weights else contextlib.nullcontext():
            if place not in storages or storages[place].memory.dtype != arg.dtype:
                place = place if place not in storages else -len(storages) - 1
                storages[place] = _Storage(_copied(arg))
            storage = storages[place]
            view = storage.memory.as_strided(arg.shape, arg.stride(), GUARD + arg.storage_offset())
        storage.views[name] = laid[name] = view
    for storage in storages.values() if poisons else ():
        with torch.inference_mode(storage.memory.is_inference()):
            storage.poison()
    return Guarded(laid, tuple(storages.values()))


def in_place(arguments: Mapping[str, Any]) -> Guarded:
    """Return the arguments with the whole memory of their views, without copies or guards. Writes
    to memory with views of several dtypes are not detected."""
    storages: dict[int, _Storage] = {}
    mixed: set[int] = set()
    for name, arg in arguments.items():
        if not isinstance(arg, torch.Tensor) or not arg.numel():
            continue
        place = arg.untyped_storage().data_ptr()
        if place not in storages:
            size = arg.untyped_storage().nbytes() // arg.element_size()
            storages[place] = _Storage(arg.detach().as_strided((size,), (1,), 0))
        elif storages[place].memory.dtype != arg.dtype:
            mixed.add(place)
        storages[place].views[name] = arg.detach()
    return Guarded(arguments, tuple(s for place, s in storages.items() if place not in mixed))


def copy_rows(pool: Guarded, rows: torch.Tensor, into: Guarded | None = None) -> Guarded:
    """Copy rows of the activations `pool`, in its layout, onto guarded memory.

    Args:
        pool: activations, each with one row per token in its first dimension.
        rows: row numbers; (tokens,), int64, on the pool's device.
        into: result of an earlier call with at least as many rows, to overwrite. Rows after the new
            ones are kept, as in buffers of vLLM.
    """
    written = iter(into.storages) if into is not None else None
    storages: list[_Storage] = []
    laid: dict[str, torch.Tensor] = {}
    for source in pool.storages:
        first = next(iter(source.views.values()))
        # With a single row, the stride may be any number.
        width = first.stride(0) if len(first) > 1 else len(source.memory) - 2 * GUARD
        whole = source.memory.as_strided((len(first), width), (width, 1), GUARD)
        if written is None:
            memory = first.new_empty(2 * GUARD + len(rows) * width)
            memory[:GUARD] = memory[len(memory) - GUARD :] = _poison(memory.dtype)
            storage = _Storage(memory)
        else:
            storage = next(written)
        inner = storage.memory[GUARD : GUARD + len(rows) * width].view(len(rows), width)
        torch.index_select(bits(whole), 0, rows, out=bits(inner))  # some devices cannot index fp8
        for name, view in source.views.items():
            storage.views[name] = laid[name] = storage.memory.as_strided(
                (len(rows), *view.shape[1:]), view.stride(), view.storage_offset()
            )
        storages.append(storage)
    return Guarded({name: laid[name] for name in pool.arguments}, tuple(storages))


def _copied(arg: torch.Tensor) -> torch.Tensor:
    size = arg.untyped_storage().nbytes() // arg.element_size()
    whole = max(size, len(arg) * arg.stride(0)) if arg.ndim else size
    memory = torch.empty(whole + 2 * GUARD, dtype=arg.dtype, device=arg.device)
    memory[GUARD : GUARD + size] = arg.detach().as_strided((size,), (1,), 0)
    return memory


def _same_place(view: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return memory.as_strided(view.shape, view.stride(), view.storage_offset())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits as integers. NaN then equals itself, and 0.0 differs from -0.0."""
    if tensor.is_floating_point():
        return tensor.view(_BITS[tensor.element_size()])
    return tensor


def words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits as 64-bit integers if possible, because these are compared
    faster."""
    try:
        return bits(tensor).view(torch.int64)
    except RuntimeError:
        return bits(tensor)


def handed_over(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return new tensors, like layers that pass `.data`. Their version counters do not count
    changes."""
    given = arguments.items()
    return {name: arg.data if isinstance(arg, torch.Tensor) else arg for name, arg in given}


def laid_like(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy the values to new memory, with the strides of `like`."""
    return values.new_empty_strided(values.shape, like.stride()).copy_(values)


def taken(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.to(tensor.device)
    if tensor.element_size() == 1:  # some devices cannot index float8
        return tensor.view(torch.uint8).index_select(0, rows).view(tensor.dtype)
    return tensor.index_select(0, rows)  # on a CPU several times faster than `tensor[rows]`


@contextlib.contextmanager
def dirty_memory() -> Iterator[None]:
    """Inside the block, fill uninitialised memory (such as from `torch.empty`) with NaN."""
    fills: Any = torch.utils.deterministic
    mode = torch.get_deterministic_debug_mode()
    before = fills.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about operators without a deterministic variant
        torch.set_deterministic_debug_mode("warn")
        fills.fill_uninitialized_memory = True
        try:
            yield
        finally:
            fills.fill_uninitialized_memory = before
            torch.set_deterministic_debug_mode(mode)


def freed_nan(sizes: Iterable[int], device: torch.device) -> list[Any]:
    """Free blocks of these sizes in bytes, full of NaN. The next allocations reuse them.

    Returns:
        Memory to keep until these allocations. Otherwise an allocator would return freed memory to
        the system, which returns it zeroed.
    """
    blocks: list[Any] = []
    for size in sizes:
        for _ in range(BLOCKS):
            blocks.append(torch.full((size,), 255, dtype=torch.uint8, device=device))
            if device.type == "cpu":  # blocks of PyTorch are aligned, others need less memory
                blocks.append(bytearray(b"\xff") * size)
    return blocks[-2:]


def joined_rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([bits(tensor.detach()) for tensor in tensors]).view(tensors[0].dtype)


def _poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else 0
