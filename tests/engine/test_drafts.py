"""Engines with a draft model, which has other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_model
from engine_run import Job
from engines import IN_ONE_PROCESS, Model, Plugin, batches, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("draft")
    sizes = {"num_hidden_layers": 1, "head_dim": 32, "hidden_size": 128}
    draft = tiny_model.make(folder, "qwen3", **sizes)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    options = {"speculative_config": speculative}
    return Job(str(model("qwen3")), batches(), logits=False, options=options)


def test_right_kernels_serve_beside_a_draft_model_with_one_digest(job: Job) -> None:
    first, second = (
        run(job, **IN_ONE_PROCESS, VLLM_FL_PER_OP="rms_norm=reference") for _ in range(2)
    )
    (report,), (other,) = first["report"], second["report"]
    assert report["digest"] == other["digest"]
    served = [each["ops"]["rms_norm"]["impl"] for each in (report, other)]
    assert served == ["reference.torch", "reference.torch"]
    assert "of them in the draft model (hidden size 128, head size 32)" in str(report["remarks"])


@pytest.mark.parametrize("factor", ["1.5", "nan"])
def test_a_kernel_that_is_wrong_at_the_draft_models_head_size_is_disabled(
    factor: str, job: Job, plugin: Plugin
) -> None:
    order = {"VLLM_FL_PER_OP": "rms_norm=vendor:drafts|reference", "WRONG_BY": factor}
    result: dict[str, Any] = run(job, **IN_ONE_PROCESS, **plugin("draft_only"), **order)
    (report,) = result["report"]
    assert report["ops"]["rms_norm"]["impl"] == "reference.torch"
    assert "on live tensors in layer (draft model) model.layers.0.self_attn" in result["log"]
