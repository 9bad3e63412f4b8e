"""Compatibility with the installed vLLM: version, required names, our variables in its table."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_fl.integration.compat import (
    hide_our_variables,
    leave_out_cuda_fusions,
    unsupported_version,
)

SUPPORTED = ("0.26.0", "0.27.2.dev3+g0123abc.cpu", "0.33.1rc1", "0.1.dev1+g0123abc")
"""The last one is a build from sources without tags."""


@pytest.mark.parametrize("version", [*SUPPORTED, "0.25.9", "0.34.0rc1", "1.0", "0.2.0", "0.100.0"])
def test_a_release_outside_the_range_is_named_with_the_range(version: str) -> None:
    problem = f"vLLM {version} is outside the supported range 0.26 to 0.33"
    assert unsupported_version(version) == (None if version in SUPPORTED else problem)


@pytest.mark.parametrize(("asked", "kept"), [(None, False), (False, False), (True, True)])
def test_a_fusion_that_vllm_has_for_cuda_is_left_out_unless_the_user_asks(
    asked: bool | None, kept: bool
) -> None:
    passes = SimpleNamespace(fuse_norm_quant=asked, fuse_act_quant=asked)
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(pass_config=passes))
    leave_out_cuda_fusions(config)
    assert vars(passes) == {"fuse_norm_quant": kept, "fuse_act_quant": kept}


def test_our_variables_are_known_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    envs = pytest.importorskip("vllm.envs", reason="vLLM is not installed")
    monkeypatch.setattr(envs, "environment_variables", {})
    monkeypatch.setenv("VLLM_FL_PREFFER", "vendor")  # settings are not read if disabled
    hide_our_variables()
    ours = {"VLLM_FL_PREFER", "VLLM_FL_PER_OP", "VLLM_FL_PREFFER"}
    assert ours <= envs.environment_variables.keys()
