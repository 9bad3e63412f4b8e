"""vLLM's collectives on FlagCX: the code that both communicators share.

Shapes are those in vLLM's `DeviceCommunicatorBase`; ranks are positions in the group. Calls run on
the current stream of the device. Reductions sum; other operations transfer bytes, for any dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from .library import Library, LibraryError, loaded_library

__all__ = ["Collectives"]

SUM = 0
BYTES = 1
"""flagcxSum and flagcxUint8."""

DTYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""flagcxDataType_t: dtypes that FlagCX can reduce."""


class Collectives:
    """Mixin to list before vLLM's class; uses the group attributes of that class."""

    cpu_group: Any
    device: torch.device
    rank_in_group: int
    world_size: int
    ranks: list[int]
    unique_name: str

    def flagcx_join(self) -> None:
        """Join the group; all its ranks must call this at the same time.

        Raises:
            LibraryError: no library was loaded.
            FlagcxError: joining failed.
        """
        library = loaded_library()
        if library is None:
            raise LibraryError(
                "FlagCX's library was not loaded before its communicator was created"
            )
        self._flagcx: Library = library
        self._streams: dict[int | None, ctypes.c_void_p] = {}
        self._where = f" in group {self.unique_name or '?'}, rank {self.rank_in_group}"
        shared = torch.zeros(256, dtype=torch.uint8)
        if self.rank_in_group == 0:
            shared = torch.frombuffer(bytearray(library.unique_id()), dtype=torch.uint8)
        dist.broadcast(shared, self.ranks[0], group=self.cpu_group)
        unique_id = bytes(shared.tolist())
        self._comm: ctypes.c_void_p | None = library.join(
            unique_id, self.rank_in_group, self.world_size, self._where
        )

    # Reductions.

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks into a new tensor."""
        given = input_.contiguous()
        result = torch.empty_like(given)
        self._call("flagcxAllReduce", given, result, given.numel(), _kind(given), SUM)
        return result

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return this rank's part, along `dim`, of the sum over the ranks.

        Raises:
            ValueError: the dimension is not divisible by the number of ranks.
        """
        return self.reduce_scatterv(input_, dim)

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Like `reduce_scatter`, with parts of `sizes`; None for equal parts.

        Raises:
            ValueError: the sum of the parts is not the size of the dimension.
        """
        given = input_.movedim(dim, 0).contiguous()
        sizes = self._parts(given.shape[0], sizes)
        rows = sizes[self.rank_in_group]
        result = torch.empty((rows, *given.shape[1:]), dtype=given.dtype, device=given.device)
        kind = _kind(given)
        if len(set(sizes)) == 1:
            self._call("flagcxReduceScatter", given, result, result.numel(), kind, SUM)
        else:
            with self._together():
                for root, part in enumerate(given.split(sizes)):
                    mine = result if root == self.rank_in_group else torch.empty_like(part)
                    if part.numel():
                        self._call("flagcxReduce", part, mine, part.numel(), kind, SUM, root)
        return result.movedim(0, dim).contiguous()

    def reduce_scatterv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = -1,
        sizes: list[int] | None = None,
    ) -> torch.Tensor:
        """Like `reduce_scatterv`, into `output`."""
        return output.copy_(self.reduce_scatterv(input_, dim, sizes))

    # Transfers.

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`."""
        given = input_.movedim(dim, 0).contiguous()
        return self._gathered(given).movedim(0, dim).contiguous()

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Like `all_gather`, with the number of rows of each rank in `sizes`.

        A list is gathered tensor by tensor.

        Raises:
            NotImplementedError: another dimension than the first.
            ValueError: this rank's number of rows differs from `sizes`.
        """
        if dim != 0:
            raise NotImplementedError(
                f"all_gatherv supports only dimension 0, as in vLLM, got {dim}"
            )
        if isinstance(input_, list):
            return [self._gatheredv(each, sizes) for each in input_]
        return self._gatheredv(input_, sizes)

    def gather(self, input_: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Concatenate the ranks' tensors along `dim` on rank `dst`; return None on other ranks."""
        given = input_.contiguous()
        if self.rank_in_group != dst:
            self._move("flagcxSend", given, dst)
            return None
        parts = [
            given if rank == dst else torch.empty_like(given) for rank in range(self.world_size)
        ]
        with self._together():
            for rank, part in enumerate(parts):
                if rank != dst:
                    self._move("flagcxRecv", part, rank)
        return torch.cat(parts, dim)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Copy rank `src`'s tensor into `tensor` on the other ranks."""
        whole = tensor.contiguous()
        self._call("flagcxBroadcast", whole, whole, whole.nbytes, BYTES, src)
        return tensor if whole is tensor else tensor.copy_(whole)

    def send(self, tensor: torch.Tensor, dst: int | None = None) -> None:
        """Send to rank `dst`, by default the next one."""
        to = (self.rank_in_group + 1) % self.world_size if dst is None else dst
        self._move("flagcxSend", tensor.contiguous(), to)

    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> torch.Tensor:
        """Receive from rank `src`, by default the previous one."""
        result = torch.empty(size, dtype=dtype, device=self.device)
        self._move(
            "flagcxRecv", result, (self.rank_in_group - 1) % self.world_size if src is None else src
        )
        return result

    def batch_isend_irecv(self, p2p_ops: list[Any]) -> None:
        """Run the `P2POp`s of torch.distributed as one group.

        Raises:
            ValueError: a receive buffer is not contiguous, or an op is neither isend nor irecv.
        """
        with self._together():
            for each in p2p_ops:
                if each.op is dist.isend:
                    self._move("flagcxSend", each.tensor.contiguous(), each.group_peer)
                elif each.op is not dist.irecv or not each.tensor.is_contiguous():
                    raise ValueError(
                        f"{each.op} of {tuple(each.tensor.shape)}: expected isend, or irecv into "
                        "a contiguous tensor"
                    )
                else:
                    self._move("flagcxRecv", each.tensor, each.group_peer)

    # Not supported by FlagCX.

    def get_symmetric_memory_buffer(self, *args: Any, **kwargs: Any) -> None:
        """Return None: vLLM then allocates as usual. Only NCCL has symmetric memory."""
        return None

    def checkpoint_prepare(self) -> None:
        """Raise NotImplementedError: FlagCX's connections cannot be saved."""
        raise NotImplementedError(
            f"checkpoint_prepare: FlagCX's connections cannot be saved{self._where}"
        )

    def checkpoint_restore(self) -> None:
        """Raise NotImplementedError: FlagCX's connections cannot be saved."""
        raise NotImplementedError(
            f"checkpoint_restore: FlagCX's connections cannot be restored{self._where}"
        )

    def destroy(self) -> None:
        """Leave the group. Further calls have no effect."""
        comm = getattr(self, "_comm", None)
        if comm is not None:
            self._comm = None
            for stream in self._streams.values():
                self._flagcx.free_stream(stream)
            self._streams.clear()
            self._leave(comm)
        super().destroy()  # type: ignore[misc]

    def _leave(self, comm: ctypes.c_void_p) -> None:
        self._flagcx.call("flagcxCommDestroy", comm, where=self._where)

    # Calls of the library.

    def _call(self, name: str, given: torch.Tensor, result: torch.Tensor, *numbers: int) -> None:
        """Call a function that reads `given` and writes `result`."""
        pointers = given.data_ptr(), result.data_ptr()
        self._flagcx.call(name, *pointers, *numbers, self._comm, self._stream(), where=self._where)
        self._keep(given, result)

    def _move(self, name: str, tensor: torch.Tensor, peer: int) -> None:
        """Send a tensor to rank `peer`, or receive it."""
        numbers = tensor.data_ptr(), tensor.nbytes, BYTES, peer
        self._flagcx.call(name, *numbers, self._comm, self._stream(), where=self._where)
        self._keep(tensor)

    def _stream(self) -> ctypes.c_void_p:
        """Return FlagCX's handle of the current stream."""
        raw = _current_stream(self.device)
        found = self._streams.get(raw)
        if found is None:
            found = self._streams[raw] = self._flagcx.stream(raw)
        return found

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Run the block's calls together at its end; keep their tensors alive until then."""
        assert self._comm is not None
        self._kept: list[torch.Tensor] | None = []
        try:
            with self._flagcx.group(self._comm, self._where):
                yield
        finally:
            self._kept = None

    _kept: list[torch.Tensor] | None = None

    def _keep(self, *tensors: torch.Tensor) -> None:
        if self._kept is not None:
            self._kept += tensors

    def _gathered(self, given: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' contiguous tensors."""
        rows = given.shape[0] * self.world_size
        result = torch.empty((rows, *given.shape[1:]), dtype=given.dtype, device=given.device)
        self._call("flagcxAllGather", given, result, given.nbytes, BYTES)
        return result

    def _gatheredv(self, input_: torch.Tensor, sizes: list[int] | None) -> torch.Tensor:
        given = input_.contiguous()
        if sizes is None or len(set(sizes)) == 1:
            return self._gathered(given)
        if len(sizes) != self.world_size or sizes[self.rank_in_group] != given.shape[0]:
            raise ValueError(f"got {given.shape[0]} rows, but sizes are {sizes}{self._where}")
        shape = (sum(sizes), *given.shape[1:])
        result = torch.empty(shape, dtype=given.dtype, device=given.device)
        ends = [*accumulate(sizes)]
        with self._together():
            for root, (rows, end) in enumerate(zip(sizes, ends, strict=True)):
                part = result[end - rows : end]
                if part.numel():
                    from_ = given if root == self.rank_in_group else part
                    self._call("flagcxBroadcast", from_, part, part.nbytes, BYTES, root)
        return result

    def _parts(self, rows: int, sizes: list[int] | None) -> list[int]:
        size = self.world_size
        parts = [rows // size] * size if sizes is None else sizes
        if len(parts) != size or sum(parts) != rows:
            wanted = f"{size} equal parts" if sizes is None else f"parts of {sizes}"
            raise ValueError(f"{rows} rows cannot be split into {wanted}{self._where}")
        return parts


def _kind(tensor: torch.Tensor) -> int:
    """Return FlagCX's number of the tensor's dtype, for reductions."""
    kind = DTYPES.get(tensor.dtype)
    if kind is None:
        raise NotImplementedError(f"FlagCX does not support reductions of {tensor.dtype}")
    return kind


def _current_stream(device: torch.device) -> int | None:
    """Return the handle of the device's current stream; None on the CPU."""
    if device.type == "cpu":
        return None
    stream = torch.get_device_module(device.type).current_stream()
    for name in (f"{device.type}_stream", "cuda_stream"):
        raw = getattr(stream, name, None)
        if raw is not None:
            return int(raw)
    raise NotImplementedError(f"torch's {type(stream).__name__} has no stream handle")
