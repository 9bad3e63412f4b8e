"""Where vLLM runs `concat_and_cache_mla`: latent attention writes its cache with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts.binding import Binding, Bound, FunctionPlace, OperatorPlace, put

from ._caches import BLOCK_SIZE, holds_as_is
from ._latent import KV_RANK, ROPE_SIZE

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["BINDING"]


def _into(op: Bound) -> Bound:
    """The operator of CUDA builds, over the op."""

    def kernel(
        kv_c: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        scale: Tensor,
    ) -> Any:
        if not holds_as_is(kv_cache_dtype, kv_cache, kv_c):
            return NotImplemented
        tokens = slot_mapping.shape[0]
        if kv_c.shape[0] != tokens:  # padded, as vLLM's CUDA graphs need it; the slots are not
            kv_c, k_pe = kv_c[:tokens], k_pe[:tokens]
        put(kv_cache, op(kv_c, k_pe, kv_cache, slot_mapping))
        return None

    return kernel


def _from(replaced: Bound) -> Bound:
    def concat_and_cache_mla(
        kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        import torch

        # Demanded, and not read where nothing is quantised: writing it would be a launch a layer.
        scale = torch.empty(1, dtype=torch.float32, device=kv_c.device)
        replaced(kv_c, k_pe, kv_cache, slot_mapping, "auto", scale)
        return kv_cache

    return concat_and_cache_mla


def _into_cpu(op: Bound) -> Bound:
    """The operator of the CPU build, over the op."""

    def kernel(kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> Any:
        if k_pe.ndim != 2 or str(slot_mapping.dtype) != "torch.int64":
            return NotImplemented
        put(kv_cache, op(kv_c_normed, k_pe, kv_cache, slot_mapping))
        return None

    return kernel


def _from_cpu(replaced: Bound) -> Bound:
    def concat_and_cache_mla(
        kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        replaced(kv_c, k_pe, kv_cache, slot_mapping)
        return kv_cache

    return concat_and_cache_mla


def _into_method(op: Bound) -> Bound:
    """The method of attention on CPUs without AMX, which calls no operator, over the op."""

    def do_kv_cache_update(
        self: Any,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> Any:
        if not holds_as_is(kv_cache_dtype, kv_cache, kv_c_normed):
            return NotImplemented
        if kv_cache.numel():  # there is none yet when vLLM runs the model for its memory
            slots = slot_mapping.flatten().long()
            put(kv_cache, op(kv_c_normed, k_pe.squeeze(1), kv_cache, slots))
        return None

    return do_kv_cache_update


def _from_method(replaced: Bound) -> Bound:
    def concat_and_cache_mla(
        kv_c: Tensor, k_pe: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        # Neither the attention itself nor a scale is looked at.
        replaced(None, kv_c, k_pe.unsqueeze(1), kv_cache, slot_mapping, "auto", None)
        return kv_cache

    return concat_and_cache_mla


BINDING = Binding(
    places=(
        OperatorPlace(
            "_C_cache_ops::concat_and_cache_mla",
            ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "scale"),
            _into,
            _from,
            grants=("kv_cache",),
            tokens="slot_mapping",  # the latent may be padded
        ),
        OperatorPlace(
            "_C::concat_and_cache_mla_cpu",
            ("kv_c_normed", "k_pe", "kv_cache", "slot_mapping"),
            _into_cpu,
            _from_cpu,
            grants=("kv_cache",),
            tokens="slot_mapping",
        ),
        FunctionPlace(
            ("vllm.v1.attention.backends.mla.cpu_mla.CPUMLAImpl.do_kv_cache_update",),
            (
                "self",
                "kv_c_normed",
                "k_pe",
                "kv_cache",
                "slot_mapping",
                "kv_cache_dtype",
                "k_scale",
            ),
            _into_method,
            _from_method,
            grants=("kv_cache",),
            tokens="slot_mapping",
        ),
    ),
    sizes=(KV_RANK, ROPE_SIZE, BLOCK_SIZE),
    not_reached=(
        "quantised caches (kv_cache_dtype fp8, fp8_ds_mla, nvfp4_ds_mla): vLLM's own kernel takes "
        "these calls",
        "the rope that a fusion pass of vLLM puts into the same kernel "
        "(`concat_and_cache_mla_rope_fused`), in compiled mode on CUDA",
        "all layers of a drafter in one kernel (`concat_and_cache_mla_grouped`), and models with "
        "kernels of their own",
    ),
    when=lambda config: config.model_config.use_mla,
    between_graphs=True,
)
