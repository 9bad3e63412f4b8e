"""Wrong versions of Ascend's attention, each with one mistake: its tests fail on every one."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import test_attention_backend as tests
from emulated.calls import VARIABLE as COUNTS
from mutating import Mutant, made_anew

from vllm_fl_ascend import attention_request
from vllm_fl_ascend.impl import attention, masks

EDITS: list[tuple[ModuleType, str, list[tuple[str, str]]]] = [
    (
        attention,
        "lengths",
        [
            ("lengths[:sequences].tolist()", "lengths[:sequences].cumsum(0).tolist()"),
            ("_cpu[1 : sequences + 1].tolist()", "_cpu[: sequences + 1].diff().tolist()"),
            ("_cpu[1 : sequences + 1]", "_cpu[:sequences]"),
            (
                "actual_seq_lengths=attn_metadata.query_ends",
                "actual_seq_lengths=attn_metadata.seq_lens",
            ),
            (
                "actual_seq_lengths_kv=attn_metadata.seq_lens",
                "actual_seq_lengths_kv=attn_metadata.query_ends",
            ),
            ("lengths[:sequences].tolist()", "(lengths[:sequences] - 1).tolist()"),
            ("lengths[:sequences].tolist()", "(lengths[:sequences] + 1).tolist()"),
            ("speculative_config is None", "speculative_config is not None"),
            ("if lengths is None:", "if False:"),
            ("if lengths is None:", "if True:"),
        ],
    ),
    (
        masks,
        "mask",
        [
            (".triu_(1)", ".tril_(-1)"),
            (".triu_(1)", ".triu_(0)"),
            (".triu_(1)", ".triu_(2)"),
            ("dtype=torch.int8", "dtype=torch.float16"),
            ("EDGE = 2048", "EDGE = 1024"),
            ('"sparse_mode": 3', '"sparse_mode": 2'),
            ('"sparse_mode": 3', '"sparse_mode": 0'),
            ('{"sparse_mode": 0}', '{"atten_mask": template(device), "sparse_mode": 3}'),
            ('"sparse_mode": 4', '"sparse_mode": 3'),
            ("window - 1", "window"),
            ("window - 1", "window + 1"),
            ('"next_tokens": 0', '"next_tokens": 1'),
            (', "next_tokens": 0', ""),
            ('"atten_mask": mask, "sparse_mode": 3', '"sparse_mode": 3'),
            ("if window is None:\n        return", "if True:\n        return"),
            ("if not causal:", "if causal:"),
            ("if window is not None:\n            raise", "if False:\n            raise"),
            ("@functools.cache\n", ""),
        ],
    ),
    (
        attention,
        "mask",
        [
            ("sight(attn_metadata.causal,", "sight(True,"),
            ("self.sliding_window, query.device", "None, query.device"),
            ("causal=common.causal", "causal=True"),
        ],
    ),
    (
        attention_request,
        "block size",
        [
            ("BLOCK_SIZE = 128", "BLOCK_SIZE = 64"),
            ("BLOCK_SIZE = 128", "BLOCK_SIZE = 16"),
        ],
    ),
    (
        attention,
        "block size",
        [
            ("block_size=BLOCK_SIZE,", ""),
            ("block_size=BLOCK_SIZE,", "block_size=2 * BLOCK_SIZE,"),
            ("block_table_tensor[:sequences]", "block_table_tensor[:sequences] + 1"),
            ("block_table_tensor[:sequences]", "block_table_tensor[:sequences].flip(1)"),
            ("block_table_tensor[:sequences]", "block_table_tensor[:sequences].long()"),
            ("block_table=attn_metadata.block_table,", ""),
            ("block_size in (None, BLOCK_SIZE)", "block_size % BLOCK_SIZE == 0"),
            ("return [BLOCK_SIZE]", "return [16]"),
        ],
    ),
    (
        attention,
        "layout",
        [
            ('input_layout="TND"', 'input_layout="BSND"'),
            ('input_layout="TND",', ""),
            ("keys.flatten(2),", "keys,"),
            ("query[:tokens].contiguous()", "query[:tokens]"),
            ("query[:tokens].contiguous()", "query.contiguous()"),
            ("KVCacheLayout.LHBNC", "KVCacheLayout.LBHNC"),
            ("KVCacheLayout.LHBNC", "KVCacheLayout.LBNHC"),
            ("num_head_slots=2, ", ""),
            ("state_content_bytes=size", "state_content_bytes=2 * size"),
            ("spec.dtype.itemsize", "4"),
            ("return (2, num_blocks,", "return (num_blocks, 2,"),
            ("kv_cache.transpose(0, 1) if", "kv_cache if"),
            ("if SHAPED_HERE:", "if False:"),
        ],
    ),
    (
        attention,
        "keyword",
        [
            ("num_key_value_heads=self", "num_kv_heads=self"),
            ("actual_seq_lengths_kv=", "actual_seq_kvlen="),
            ("block_table=attn", "block_tables=attn"),
            ("scale=self.scale", "softmax_scale=self.scale"),
            (
                "torch.ops.npu.npu_fused_infer_attention_score",
                "torch.ops.npu.npu_fused_infer_attention_score_v2",
            ),
        ],
    ),
    (
        masks,
        "keyword",
        [
            ('"atten_mask": mask, "sparse_mode": 3', '"attn_mask": mask, "sparse_mode": 3'),
            ('"pre_tokens"', '"pre_tockens"'),
        ],
    ),
    (
        attention,
        "scale and heads",
        [
            ("scale=self.scale,", ""),
            ("scale=self.scale,", "scale=self.head_size**-0.5,"),
            ("float(scale)", "1.0"),
            ("num_heads=self.num_heads,", ""),
            ("num_key_value_heads=self.num_kv_heads,", ""),
            ("self.num_kv_heads = num_kv_heads or num_heads", "self.num_kv_heads = num_heads"),
        ],
    ),
    (
        attention,
        "slots",
        [
            (".clamp_min(0)", ""),
            (".clamp_min(0)", ".clamp_min(1)[:] + 1"),
            (".clamp_min(0)", ".clamp_min(1).sub(1)"),
            ("slot_mapping[: query_ends[-1]]", "slot_mapping"),
            (".clamp_min(0)", ".clamp_min(BLOCK_SIZE)"),
        ],
    ),
    (
        attention,
        "cache",
        [
            ('cache_mode="Norm",', ""),
            ('cache_mode="Norm"', 'cache_mode="PA_NZ"'),
            ("value[:tokens].contiguous(),", "key[:tokens].contiguous(),"),
            ("key[:tokens].contiguous(),", "key[:tokens],"),
            ("value[:tokens].contiguous(),", "value[:tokens],"),
            ("keys, values = (plane", "values, keys = (plane"),
            ("values.flatten(2),", "keys.flatten(2),"),
            ("if kv_cache is self._cache:", "if self._cache is not None:"),
            ("if key is not None and value is not None and self", "if self"),
            (" and self.kv_sharing_target_layer_name is None", ""),
            ("output[:tokens].copy_(attended)", "output[: len(attended) - 1].copy_(attended[:-1])"),
            ("output[:tokens].copy_(attended)\n        return output", "return attended"),
            ("return output.fill_(0)", "return output"),
            ("planes.shape[0] != 2\n", "False\n"),
            ("or planes.shape[2] != BLOCK_SIZE\n", ""),
            ("or planes.shape[3:].numel() != heads * size\n", ""),
            ("or not all(plane.is_contiguous() for plane in planes)\n", ""),
        ],
    ),
    (
        attention,
        "device",
        [
            ("lengths = common.seq_lens_cpu_upper_bound if", "lengths = common.seq_lens if"),
            ("tokens = attn_metadata.query_ends[-1]", "tokens = int((query[:, 0, 0] < 1e9).sum())"),
        ],
    ),
    (
        attention,
        "refusal",
        [
            ('"logits_soft_cap": logits_soft_cap or None,', ""),
            ("            **others,\n        }", "        }"),
            ('"alibi_slopes": alibi_slopes,', ""),
            ("if output_scale is not None or", "if"),
            ("or output_block_scale is not None:", ":"),
            ("if not isinstance(common.causal, bool):", "if False:"),
            ("if spec.head_size != spec.head_size_v:", "if False:"),
            ('return "CUSTOM"', 'return "ASCEND"'),
        ],
    ),
    (
        attention_request,
        "refusal",
        [
            ("if request.use_mla:", "if False:"),
            ("if request.use_sparse:", "if False:"),
            ("if request.has_sink:", "if False:"),
            ("if dtype not in DTYPES:", "if False:"),
            ("(64, 128, 192)", "(64, 128, 192, 256)"),
            ("if request.block_size not in (None, BLOCK_SIZE):", "if False:"),
            ('if kind != "decoder":', "if False:"),
            ('("use_", "has_")', '("has_",)'),
            ("if request.kv_cache_dtype not in KV_CACHE_DTYPES:", "if False:"),
        ],
    ),
]
"""Module, family of mistakes, and its mistakes: what stands there, and what is put there."""

MUTANTS = [
    Mutant(family, module, old, new) for module, family, edits in EDITS for old, new in edits
]


def test_without_a_mistake_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert failing(None, monkeypatch) is None


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mistake_is_seen(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failing(mutant, monkeypatch) is not None


def failing(mutant: Mutant | None, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The first test of attention that fails on the sources with this mistake; None for none."""
    monkeypatch.delenv(COUNTS, raising=False)  # calls of wrong versions do not count
    request = made_anew(attention_request, mutant)
    masking = made_anew(masks, mutant)
    sizes = {name: getattr(request, name) for name in ("BLOCK_SIZE", "HEAD_SIZES")}
    backend = made_anew(attention, mutant, sight=masking.sight, **sizes)
    monkeypatch.setattr(tests, "attention", backend)
    monkeypatch.setattr(tests, "masks", masking)
    monkeypatch.setattr(tests, "supports_attention", request.supports_attention)
    for name, function in reversed(vars(tests).items()):  # the quick ones stand last
        if name.startswith("test_"):
            for arguments in _calls(function):
                with pytest.MonkeyPatch.context() as own:
                    if "monkeypatch" in inspect.signature(function).parameters:
                        arguments["monkeypatch"] = own
                    try:
                        function(**arguments)
                    except (Exception, pytest.fail.Exception):
                        return name
    return None


def _calls(function: Any) -> Iterator[dict[str, Any]]:
    """The arguments of each case of a test, from its one `parametrize`."""
    for mark in getattr(function, "pytestmark", ()):
        names, values = mark.args
        for value in values:
            if isinstance(names, str):
                yield {names: value}
            else:
                yield dict(zip(names, value, strict=True))
        return
    yield {}
