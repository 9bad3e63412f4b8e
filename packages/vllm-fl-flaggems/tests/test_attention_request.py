"""Attention requests that FlagGems supports or rejects, with the reasons."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from attention_requests import PLAIN, UNSUPPORTED

from vllm_fl_flaggems import attention_request
from vllm_fl_flaggems.attention_request import supports_attention, supports_decode


@pytest.fixture(autouse=True)
def runnable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_request, "available", lambda: True)


def test_a_plain_decoder_is_taken() -> None:
    for change in ({}, {"dtype": torch.float16}, {"block_size": 16}):
        assert supports_attention(dataclasses.replace(PLAIN, **change)) is True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *UNSUPPORTED,
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"head_size": 512}, "512"),
        ({"head_size": 100}, "100"),
        ({"block_size": 8}, "8"),
    ],
)
def test_what_it_would_get_wrong_is_refused(change: dict[str, Any], reason: str) -> None:
    assert reason in str(supports_attention(dataclasses.replace(PLAIN, **change)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(each for each in UNSUPPORTED if each[1] not in ("use_kv_connector", "use_dcp")),
        ({"head_size": 64}, "heads of 64: "),
        ({"extras": {"num_kv_heads": 2}}, "32 heads for 2 key heads: "),
        ({"extras": {"num_kv_heads": 4}, "num_heads": 36}, "36 heads for 4 key heads: "),
    ],
)
def test_decoding_is_left_to_vllm(change: dict[str, Any], reason: str) -> None:
    assert reason in str(supports_decode(dataclasses.replace(PLAIN, **change)))


def test_decoding_needs_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("vllm.v1.attention.backends.fa_utils")
    for version in (3, None):
        monkeypatch.setattr(utils, "get_flash_attn_version", lambda version=version, **_: version)
        assert (supports_decode(PLAIN) is True) == (version == 3)
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True, raising=False)
    assert "not batch-invariant" in str(supports_decode(PLAIN))


def test_where_flaggems_cannot_run_the_reason_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_request, "available", lambda: "FlagGems is not installed")
    assert supports_attention(PLAIN) == "FlagGems is not installed"


@pytest.mark.parametrize("laid_out", [True, False], ids=["by vLLM", "by the backend"])
@pytest.mark.parametrize("asked", [None, "NHD", "HND", "LHBNC"])
def test_a_layout_of_the_cache_that_the_user_asks_for_must_be_one_it_reads(
    asked: str | None, laid_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = pytest.importorskip("vllm.v1.attention.backend").AttentionBackend
    if not laid_out:
        monkeypatch.setattr(backend, "get_kv_cache_shape", None, raising=False)
    monkeypatch.setattr("vllm.envs.VLLM_KV_CACHE_LAYOUT", asked, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name, answer in (("problem", ""), ("block_pointers_work", True)):
        monkeypatch.setattr(attention_request, name, lambda answer=answer: answer)
    verdict = supports_attention(PLAIN)
    reads = asked in (None, "LHBNC") if laid_out else asked != "HND"
    assert (verdict is True) == reads
    assert reads or f"VLLM_KV_CACHE_LAYOUT={asked}" in str(verdict)
