"""Compatibility with the installed vLLM: version, required names, our variables in its table."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import forked
import pytest

from vllm_fl.integration.compat import leave_out_cuda_fusions, unsupported_version

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.mark.parametrize("version", ["0.26.0", "0.27.2.dev3+g0123abc.cpu", "0.33.1rc1"])
def test_a_release_of_the_range_is_supported(version: str) -> None:
    assert unsupported_version(version) is None
    assert unsupported_version("0.1.dev1+g0123abc") is None, "a build from sources without tags"


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0rc1", "1.0", "0.2.0", "0.100.0"])
def test_another_release_is_named_with_the_range(version: str) -> None:
    assert (
        unsupported_version(version)
        == f"vLLM {version} is outside the supported range 0.26 to 0.33"
    )


@pytest.mark.parametrize(("asked", "kept"), [(None, False), (False, False), (True, True)])
def test_a_fusion_that_vllm_has_for_cuda_is_left_out_unless_the_user_asks(
    asked: bool | None, kept: bool
) -> None:
    passes = SimpleNamespace(fuse_norm_quant=asked, fuse_act_quant=asked)
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(pass_config=passes))
    leave_out_cuda_fusions(config)
    assert vars(passes) == {"fuse_norm_quant": kept, "fuse_act_quant": kept}


def run(code: str, *args: str, **variables: str) -> tuple[Any, str]:
    """(the JSON that `code` prints last, its stderr)."""
    done = forked.run(code, *args, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


FACTORS = """
import json, os, sys
from vllm_fl.integration.compat import hide_our_variables
import vllm.envs
hide_our_variables(*map(str.split, sys.argv[1:]))
ours = [name for name in os.environ if name.startswith("VLLM_FL_")]
unknown = [name for name in ours if name not in vllm.envs.environment_variables]
print(json.dumps([len(ours), unknown, vllm.envs.compile_factors()], default=str))
"""


@needs_vllm
def test_our_variables_are_known_to_vllm_and_leave_its_compile_key_alone() -> None:
    unset, _ = run(FACTORS)
    some, _ = run(FACTORS, VLLM_FL_PREFER="vendor", VLLM_FL_PER_OP="rms_norm=vendor")
    assert some[:2] == [2, []]
    unheard_of, _ = run(FACTORS, VLLM_FL_PREFFER="vendor")  # settings are not read if disabled
    assert unheard_of[:2] == [1, []]
    assert some[2] == unset[2]
