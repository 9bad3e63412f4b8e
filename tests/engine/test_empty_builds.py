"""vLLM without compiled operators, on a plugin's device: the answers equal stock's. `nox -s
tests-empty` installs both, and passes the path of a Python with vLLM's CPU build."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny_model
from engine_run import STOCK, Job
from engines import (
    IN_ONE_PROCESS,
    PLUGINS,
    REFERENCE,
    Once,
    Runner,
    difference,
    direct_model,
    path_of,
    run,
)

from vllm_fl.contracts.binding import OperatorTarget
from vllm_fl.integration.targets import targets
from vllm_fl.plugins.registry import known_contracts

pytestmark = pytest.mark.skipif(
    find_spec("fl_bare_cpu") is None,
    reason="neither an empty build of vLLM nor fl-bare-cpu is here: nox -s tests-empty",
)

SIZES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
}
CALLED = {
    "qwen3": {"rms_norm", "rotary_embedding", "silu_and_mul"},
    "gemma3": {"rms_norm", "rotary_embedding", "gelu_and_mul"},
}
OURS = {**REFERENCE, "VLLM_FL_DISPATCH_DEBUG": "1"}
SECOND = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "TRITON_INTERPRET": "1",
    # vLLM accepts a Triton without a device only if no device is visible.
    "CUDA_VISIBLE_DEVICES": "",
}
"""vLLM's second model runner, with its kernels in Triton's interpreter."""

CAPTURED = (1, 2, 4)
"""Batch sizes, in tokens, captured with `start(graphs=True)`."""

LAYERS = 2
"""Layers of the tiny models, each with one activation."""

WITHOUT_TOKEN = 1
"""Steps missing from vLLM's counter: the long prompt's first chunk, which yields no token."""


def prompt(first: int, length: int) -> list[int]:
    return [(first + 7 * i) % 500 + 3 for i in range(length)]


def batches() -> list[list[list[int]]]:
    """A short prompt, six together, one longer than Gemma's window, and its beginning again."""
    long = prompt(11, 150)
    return [[prompt(5, 9)], [prompt(i, 20 + 15 * i) for i in range(6)], [long], [[*long[:140], 9]]]


@pytest.fixture(scope="module")
def start(once: Once, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """`start(family, eager=True, stock=False, direct=False, graphs=False, **variables)`: a run.
    `direct` uses vLLM's operator, called by name, as activation instead of vLLM's layer; with
    `graphs` vLLM captures breakable CUDA graphs and compiles nothing."""

    @cache
    def model(family: str, direct: bool) -> Path:
        folder = tiny_model.make(tmp_path_factory.mktemp("models"), family, **SIZES[family])
        return direct_model(folder) if direct else folder

    def begin(
        family: str,
        eager: bool = True,
        stock: bool = False,
        direct: bool = False,
        graphs: bool = False,
        **more: str,
    ) -> dict[str, Any]:
        # 80 tokens per step: longer prompts are prefilled in chunks, together with decoded tokens.
        options: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 80}
        if graphs:
            captured = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [*CAPTURED]}
            options["compilation_config"] = captured
            more |= {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1", **SECOND}
        job = Job(
            str(model(family, direct)),
            batches(),
            new_tokens=6,
            eager=eager and not graphs,
            options=options,
            prompt_logits=False,  # vLLM would not use its prefix cache with them
            updates=[["vllm_fl_verify", {}, False]] if graphs else [],
        )
        if stock:
            variables = {"python": os.environ["STOCK_PYTHON"], **STOCK, **IN_ONE_PROCESS}
            return once(f"stock-{family}", job, timeout=300, **variables)
        # For one family the engine has its own process, as users start it.
        variables = OURS if family == "gemma3" else {**OURS, **IN_ONE_PROCESS}
        if direct:
            variables |= path_of(PLUGINS / "direct")
        return run(job, timeout=300, **(variables | more))

    return begin


def test_this_vllm_has_no_compiled_operator() -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    assert list(Path(spec.origin).parent.rglob("*.so")) == []


GATED = {"qwen3": "linear_silu_and_mul", "gemma3": "linear_gelu_tanh_and_mul"}
"""Family -> the op that fuses its MLP's first product with the activation."""


@pytest.mark.parametrize("family", GATED)
def test_a_model_is_served_as_stock_serves_it(family: str, start: Runner) -> None:
    ours, stock = start(family), start(family, stock=True)

    (report,) = ours["report"]
    impls = {op: entry["impl"] for op, entry in report["ops"].items()}
    assert impls.pop("attention_backend") == "vendor.bare_cpu"
    # Passes insert these into graphs, not into eager code.
    assert impls.pop("qk_norm_rope") == impls.pop("linear") == impls.pop(GATED[family]) == "stock"
    assert set(impls.values()) == {"reference.torch"}
    assert "attention_backend=vendor.bare_cpu " in ours["log"] and report["mode"] == "eager"
    assert "Cannot access accelerator" not in ours["log"]  # at shutdown
    if find_spec("vllm.v1.core.kv_cache_config_builder") is not None:  # vLLM 0.33
        assert "bare_cpu groups the layers" in ours["log"]
    assert_the_same(stock, ours, CALLED[family])


def assert_the_same(stock: dict[str, Any], ours: dict[str, Any], called: set[str]) -> None:
    """Answers and steps equal stock's, and the reference was called for these ops."""
    (report,) = ours["report"]
    assert report["demotions"] == report["fallbacks"] == {}
    for op in called:
        assert report["calls"][op]["reference.torch"] > 0
    assert ours["cached"] == stock["cached"] == [*[0] * 8, 128]
    assert ours["steps"] == stock["steps"]
    assert_same_answers(stock, ours)


def assert_same_answers(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    assert ours["tokens"] == stock["tokens"]
    assert difference(stock, ours) <= 1e-4  # 100 times float32's rounding after two layers


def module(name: str) -> dict[str, str]:
    """The variables that load a plugin of tests/engine/plugins."""
    return {"VLLM_FL_PLUGIN_MODULES": name, **path_of(PLUGINS)}


@pytest.mark.parametrize(
    ("family", "eager"),
    [
        ("qwen3", True),
        pytest.param("qwen3", False, marks=pytest.mark.slow),
        pytest.param("gemma3", True, marks=pytest.mark.slow),
    ],
)
def test_the_second_model_runner_serves_as_the_first(
    family: str, eager: bool, start: Runner
) -> None:
    """Its warm-up really decodes as many requests as allowed; none of that is counted."""
    ours, stock = start(family, eager, **SECOND), start(family, stock=True)
    assert "calls on live tensors with the KV cache in memory" in ours["log"]
    assert_the_same(stock, ours, CALLED[family])
    (report,) = ours["report"]
    (activation,) = CALLED[family] - {"rms_norm", "rotary_embedding"}
    if eager:
        steps = ours["steps"] + WITHOUT_TOKEN
        assert report["calls"][activation]["reference.torch"] == LAYERS * steps


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
def test_any_layout_of_the_kv_cache_serves(layout: str, start: Runner) -> None:
    """Heads before slots, or blocks that hold the pages of all layers at offsets."""
    ours = start("qwen3", VLLM_KV_CACHE_LAYOUT=layout, **IN_ONE_PROCESS)
    assert f"Using {layout} KV cache layout" in ours["log"]
    assert_the_same(start("qwen3", stock=True), ours, CALLED["qwen3"])


@pytest.mark.slow
def test_in_breakable_graphs_a_choice_is_made_when_a_batch_is_captured(start: Runner) -> None:
    """Eager mode; a replayed step runs no Python, so it is neither counted nor compared."""
    chosen = {"VLLM_FL_PER_OP": "silu_and_mul=vendor:many|reference", **module("refuses_few")}
    ours, stock = start("qwen3", graphs=True, **chosen), start("qwen3", stock=True)
    assert "Breakable CUDA graph enabled" in ours["log"]
    assert_the_same(stock, ours, {"rms_norm"})
    (report,) = ours["report"]
    assert report["mode"] == "eager"
    calls = report["calls"]["silu_and_mul"]
    assert set(calls) == {"vendor.many"} and 0 < calls["vendor.many"] < LAYERS * ours["steps"]
    (again,) = ours["updates"]
    assert "calls on live tensors" in again["answers"][0]  # eagerly, although graphs exist

    # Sampled steps are eager, like steps too large for a captured graph.
    shadowed = start("qwen3", graphs=True, VLLM_FL_SHADOW="1", **chosen)
    (report,) = shadowed["report"]
    steps = shadowed["steps"] + WITHOUT_TOKEN
    assert report["shadow"]["sampled"] == report["shadow"]["steps"] == steps
    calls, refused = report["calls"]["silu_and_mul"], report["refusals"]["silu_and_mul"]
    assert calls["vendor.many"] + calls["reference.torch"] == LAYERS * steps
    assert calls["reference.torch"] == refused["vendor.many"] > 0
    assert shadowed["tokens"] == stock["tokens"]


@pytest.mark.parametrize("family", GATED)
def test_passes_of_ours_put_kernels_in_the_place_of_what_they_find(
    family: str, start: Runner
) -> None:
    gated = GATED[family]
    one = f"linear=vendor:one;{gated}=vendor:one"
    # Or the operator exists but no vLLM code for it can be found.
    one += f";{gated.removeprefix('linear_').replace('_tanh', '')}=stock"
    ours = start(family, eager=False, VLLM_FL_PER_OP=one, **module("one_kernel"))
    assert "attention_backend=vendor.bare_cpu " in ours["log"]
    assert_the_same(start(family, stock=True), ours, {"rms_norm"})

    (report,) = ours["report"]
    # Two layers with three products each: q, k and v; output; down.
    for op, found in (("linear", 6), (gated, 2)):
        assert report["ops"][op]["impl"] == "vendor.one"
        assert report["fusions"][op]["found"] == found
        assert f"Op '{op}': {found} matches, by 'vendor.one'" in ours["log"]
        assert report["calls"][op]["vendor.one"] >= found * ours["steps"]


ROWS = """\
op_backends:
  silu_and_mul:
    <=8: stock
    rest: reference
  rms_norm:
    <=8: reference
    rest: [stock]
  linear:
    <=8: vendor:one
    rest: stock
"""


@pytest.mark.slow
def test_ranges_run_their_rows_and_a_restart_finds_them_in_the_cache(
    start: Runner, tmp_path: Path
) -> None:
    """If vLLM compiles by range, the graphs of the larger range have vLLM's products."""

    def served(rows: str) -> dict[str, Any]:
        config = tmp_path / "fl.yaml"
        config.write_text(rows)
        places = {"VLLM_FL_CONFIG": str(config), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
        return start("qwen3", eager=False, **places, **module("one_kernel"))

    first = served(ROWS)
    (report,) = first["report"]
    linear = report["fusions"]["linear"]
    assert (linear["graphs"], linear["found"]) == (3, 8), "in none of the larger range"
    again = served(ROWS)
    (report,) = again["report"]
    assert report["fusions"]["linear"]["graphs"] == 0

    stock = start("qwen3", stock=True)
    for ours in (first, again):
        assert_same_answers(stock, ours)


CPU_BUILDS_ALONE = {"_C::cpu_fused_moe", "_C::prepack_moe_weight", "_C::concat_and_cache_mla_cpu"}
"""Operators missing from the schemas of a CUDA build."""

READ = {
    *("_C::fused_add_rms_norm", "_C::fused_add_rms_norm_static_fp8_quant"),
    *("_C::fused_qk_norm_rope", "_C::rms_norm", "_C::rms_norm_dynamic_per_token_quant"),
    *("_C::rms_norm_static_fp8_quant", "_C::rotary_embedding", "_C::silu_and_mul"),
    "_C::silu_and_mul_quant",
}
"""Operators that vLLM's last pass over a compiled graph reads."""


@pytest.mark.parametrize("eager", [pytest.param(True, marks=pytest.mark.slow), False])
def test_an_operator_that_a_model_calls_by_name_is_there_and_the_plans(
    eager: bool, start: Runner
) -> None:
    ours, stock = start("qwen3", eager, direct=True), start("qwen3", stock=True)
    (report,) = ours["report"]
    assert report["demotions"] == report["fallbacks"] == {}
    assert report["calls"]["silu_and_mul"]["reference.torch"] >= LAYERS * ours["steps"]
    reported = report["operators"]["silu_and_mul"]["_C::silu_and_mul"]
    assert reported["replaced"] is None and reported["overridden_by"] is None
    taken = {name: it for each in report["operators"].values() for name, it in each.items()}
    left = {name for name, it in taken.items() if "left" in it}
    planned = {
        target.name
        for op, target in targets(known_contracts().bindings, OperatorTarget)
        if report["ops"].get(op, {}).get("impl") == "reference.torch"
    }
    assert taken.keys() == planned and left <= CPU_BUILDS_ALONE
    assert set(report["defined"]) == planned - left | (set() if eager else READ)
    assert_same_answers(stock, ours)
