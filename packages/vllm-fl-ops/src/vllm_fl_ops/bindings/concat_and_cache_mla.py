"""Binding of `concat_and_cache_mla`: latent attention writes its cache with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_fl.contracts.binding import Binding, FunctionTarget, OperatorTarget, Route

from ._caches import CACHE_BLOCK_SIZE, holds_as_is, no_scale, without_padding
from ._latent import KV_RANK, ROPE_SIZE
from ._phrases import names

if TYPE_CHECKING:
    from torch import Tensor


def _holds_as_is(kv_c: Tensor, kv_cache: Tensor, kv_cache_dtype: str) -> bool:
    return holds_as_is(kv_cache_dtype, kv_cache, kv_c)


def _fits(k_pe: Tensor, slot_mapping: Tensor) -> bool:
    return k_pe.ndim == 2 and str(slot_mapping.dtype) == "torch.int64"


def _is_written(kv_cache_dtype: str, kv_cache: Tensor, kv_c_normed: Tensor) -> bool:
    """Return whether a cache exists, and stores the rows unchanged.

    To measure memory, vLLM runs the model before the cache exists. vLLM's function then returns at
    once.
    """
    return bool(kv_cache.numel()) and holds_as_is(kv_cache_dtype, kv_cache, kv_c_normed)


BINDING = Binding(
    targets=(
        OperatorTarget(
            "_C_cache_ops::concat_and_cache_mla",
            ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "scale"),
            Route(
                args={
                    "kv_c": lambda kv_c, slot_mapping: without_padding(kv_c, slot_mapping.shape[0]),
                    "k_pe": lambda k_pe, slot_mapping: without_padding(k_pe, slot_mapping.shape[0]),
                },
                only=_holds_as_is,
                out="kv_cache",
                own_args={"kv_cache_dtype": lambda: "auto", "scale": no_scale},
            ),
            tokens="slot_mapping",  # the latent may be padded
        ),
        OperatorTarget(
            "_C::concat_and_cache_mla_cpu",
            ("kv_c_normed", "k_pe", "kv_cache", "slot_mapping"),
            Route(args={"kv_c": "kv_c_normed"}, only=_fits, out="kv_cache"),
            tokens="slot_mapping",
        ),
        FunctionTarget(
            ("vllm.v1.attention.backends.mla.cpu_mla.CPUMLAImpl.do_kv_cache_update",),
            names("self, kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale"),
            Route(
                args={
                    "kv_c": "kv_c_normed",
                    "k_pe": lambda k_pe: k_pe.squeeze(1),
                    "slot_mapping": lambda slot_mapping: slot_mapping.flatten().long(),
                },
                only=_is_written,
                out="kv_cache",
                own_args={  # the function ignores the attention object and the scale
                    "self": lambda: None,
                    "k_pe": lambda k_pe: k_pe.unsqueeze(1),
                    "slot_mapping": lambda slot_mapping: slot_mapping,
                    "kv_cache_dtype": lambda: "auto",
                    "k_scale": lambda: None,
                },
            ),
            tokens="slot_mapping",
        ),
    ),
    sizes=(KV_RANK, ROPE_SIZE, CACHE_BLOCK_SIZE),
    not_reached=(
        "quantised caches (kv_cache_dtype fp8, fp8_ds_mla, nvfp4_ds_mla): vLLM's kernel runs "
        "these calls",
        "a rope that a vLLM fusion pass adds to the same kernel "
        "(`concat_and_cache_mla_rope_fused`), in compiled mode on CUDA",
        "one kernel for all layers of a drafter (`concat_and_cache_mla_grouped`), and models with "
        "their own kernels",
    ),
    when=lambda config: config.model_config.use_mla,
    between_graphs=True,
)
