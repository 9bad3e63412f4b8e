"""The tool that reads what vLLM's operators look like from its sdists."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from operator_schemas import PASS, TABLE, bound, facts

CPP = """
STABLE_TORCH_LIBRARY_FRAGMENT(_C, ops) {
  // ops.def("gone(Tensor! result) -> ()");
  ops.def(
      "norm(Tensor! result, Tensor input, "
      "    float epsilon) -> ()");
  ops.impl("norm", torch::kCUDA, &norm);
}
TORCH_LIBRARY_EXPAND(CONCAT(TORCH_EXTENSION_NAME, _cache_ops), cache_ops) {
  cache_ops.def("swap(Tensor! a) -> ()", {stride_tag});
}
TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, m) { m.def("gate(Tensor! out) -> ()"); }
"""

PYTHON = """
targets = [torch.ops._C.norm.default, torch.ops.aten.copy.default]
if hasattr(torch.ops._C, "rare") and at == torch.ops._C.rare.default:
    torch.ops._C.called(x)
"""

Sdist = Callable[..., Path]


@pytest.fixture
def sdist(tmp_path: Path) -> Sdist:
    """`sdist(version, {file: text})`: an sdist of vLLM with these files."""

    def make(version: str, files: dict[str, str]) -> Path:
        path = tmp_path / f"vllm-{version}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, text in files.items():
                info = tarfile.TarInfo(f"vllm-{version}/{name}")
                info.size = len(text.encode())
                archive.addfile(info, io.BytesIO(text.encode()))
        return path

    return make


def test_a_release_is_its_cuda_builds_schemas_and_what_the_pass_reads(sdist: Sdist) -> None:
    files = {
        "csrc/libtorch_stable/torch_bindings.cpp": CPP,
        "csrc/cpu/torch_bindings.cpp": CPP.replace("result", "out"),
        "csrc/moe/torch_bindings.cpp": 'TORCH_LIBRARY(_moe_C, m) { m.def("m(Tensor x) -> ()"); }',
        PASS: PYTHON,
    }
    schemas, wanted = facts(sdist("0.30.0", files))
    assert schemas["_C::norm"] == (
        "_C::norm(Tensor! result, Tensor input, float epsilon) -> ()",
        "csrc/libtorch_stable/torch_bindings.cpp",
    )
    assert schemas["_moe_C::m"][1] == "csrc/moe/torch_bindings.cpp"
    assert wanted == {"_C::norm", "aten::copy"}


def test_an_operator_that_vllm_reads_here_and_probes_for_there_is_an_error(sdist: Sdist) -> None:
    """Defined without a kernel it would answer the probe wrongly."""
    probe = 'FAST = hasattr(torch.ops._C, "norm")\n'
    files = {"csrc/torch_bindings.cpp": CPP, PASS: PYTHON, "vllm/layers.py": probe}
    with pytest.raises(ValueError, match="probes for _C::norm"):
        facts(sdist("0.30.0", files))


CPU_BUILDS_ALONE = {
    "_C::causal_conv1d_update_cpu_vec",
    "_C::chunk_gated_delta_rule_cpu",
    "_C::concat_and_cache_mla_cpu",
    "_C::cpu_fused_moe",
    "_C::fused_gdn_gating_cpu",
    "_C::fused_sigmoid_gating_delta_rule_update_cpu",
    "_C::prepack_moe_weight",
}
"""Operators of bindings that no CUDA build has."""


def test_the_table_that_is_here_has_what_core_binds() -> None:
    kept = {e["schema"].partition("(")[0] for e in json.loads(TABLE.read_text())["operators"]}
    assert bound() - CPU_BUILDS_ALONE <= kept
