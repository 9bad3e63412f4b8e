"""Which vLLM we run in: its version, what it must have, and our variables in its table."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest

from vllm_fl.integration.compat import OVERRIDDEN, leave_out_cuda_fusions, missing, outside

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def write_vllm(folder: Path, *, without: str = "") -> Path:
    """A package that has the names of `OVERRIDDEN`, but for `without` (`module.name`)."""
    for module, names in OVERRIDDEN.items():
        if module == without:
            continue
        lines: list[str] = []
        classes: dict[str, list[str]] = {}
        for name in names:
            if f"{module}.{name}" == without:
                continue
            owner, _, attribute = name.rpartition(".")
            if owner:
                classes.setdefault(owner, []).append(f"    {attribute}: object = None")
            else:
                lines.append(f"{name} = None")
        for owner, attributes in classes.items():
            lines += [f"class {owner}:", *attributes]
        path = folder / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("version", ["0.26.0", "0.27.2.dev3+g0123abc.cpu", "0.33.1rc1"])
def test_a_release_of_the_range_is_supported(version: str) -> None:
    assert outside(version) is None
    assert outside("0.1.dev1+g0123abc") is None, "it is judged by what it has"


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0rc1", "1.0", "0.2.0", "0.100.0"])
def test_another_release_is_named_with_the_range(version: str) -> None:
    assert outside(version) == f"vLLM {version} is outside the supported range 0.26 to 0.33"


@pytest.mark.parametrize(("asked", "kept"), [(None, False), (False, False), (True, True)])
def test_a_fusion_that_vllm_has_for_cuda_is_left_out_unless_the_user_asks(
    asked: bool | None, kept: bool
) -> None:
    passes = SimpleNamespace(fuse_norm_quant=asked, fuse_act_quant=asked)
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(pass_config=passes))
    leave_out_cuda_fusions(config)
    assert vars(passes) == {"fuse_norm_quant": kept, "fuse_act_quant": kept}


@pytest.mark.parametrize("name", [f"{module}.{[*ns][-1]}" for module, ns in OVERRIDDEN.items()])
def test_each_name_is_missed(tmp_path: Path, name: str) -> None:
    assert missing([write_vllm(tmp_path, without=name)]) == f"vllm.{name}"


def test_a_name_may_be_conditional_imported_or_asynchronous(tmp_path: Path) -> None:
    write_vllm(tmp_path)
    (tmp_path / "distributed/parallel_state.py").write_text(
        (tmp_path / "distributed/parallel_state.py").read_text().replace("_groups = None", "")
        + "\nif True:\n    from .other import groups as _groups\n"
        "else:\n    pass\n"
        "try:\n    async def get_world_group(): ...\nexcept ImportError:\n    pass\n"
    )
    assert missing([tmp_path]) is None


def test_a_package_counts_as_its_module(tmp_path: Path) -> None:
    write_vllm(tmp_path)
    (tmp_path / "platforms/__init__.py").write_text((tmp_path / "platforms.py").read_text())
    (tmp_path / "platforms.py").unlink()
    assert missing([tmp_path]) is None


def run(code: str, *args: str, **variables: str) -> tuple[Any, str]:
    """(the JSON that `code` prints last, its stderr)."""
    done = forked.run(code, *args, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@needs_vllm
def test_the_installed_vllm_has_no_obstacle_and_is_not_imported_to_see_it() -> None:
    code = (
        "import json, sys\nfrom vllm_fl.integration.compat import obstacle\n"
        "print(json.dumps([obstacle(), 'vllm' in sys.modules]))"
    )
    assert run(code)[0] == [None, False]


BOTH_DOORS = """
import json
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
load_general_plugins()
print(json.dumps(type(current_platform).__module__))
"""


@needs_vllm
def test_a_vllm_that_lacks_what_we_override_is_stock_with_one_line(tmp_path: Path) -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations
    real = Path(next(iter(spec.submodule_search_locations)))
    copy = tmp_path / "vllm"
    # The installed one, but for a single file in which one method goes by another name.
    for folder in (Path("v1/worker"), Path("v1"), Path()):
        (copy / folder).mkdir(parents=True, exist_ok=True)
        for entry in (real / folder).iterdir():
            if not (copy / folder / entry.name).exists():
                (copy / folder / entry.name).symlink_to(entry)
    changed = copy / "v1/worker/worker_base.py"
    source = changed.read_text()
    changed.unlink()
    changed.write_text(source.replace("def load_model(", "def load_weights("))

    platform, log = run(BOTH_DOORS, PYTHONPATH=str(tmp_path))
    assert platform.startswith("vllm.platforms.")
    lines = [line for line in log.splitlines() if "vllm-fl steps aside" in line]
    assert len(lines) == 1
    assert "vLLM runs as stock: vLLM " in lines[0]
    assert "has no vllm.v1.worker.worker_base.WorkerBase.load_model" in lines[0]


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
    unheard_of, _ = run(FACTORS, VLLM_FL_PREFFER="vendor")  # stepping aside reads no settings
    assert unheard_of[:2] == [1, []]
    assert some[2] == unset[2]
