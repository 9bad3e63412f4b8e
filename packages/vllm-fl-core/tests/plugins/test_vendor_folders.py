"""Unmodified vendors in vllm-plugin-FL's form: tests/plugins/fl-form-* load and compute. Their
hardware is emulated on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_fl.dispatch import OpManager, OpRegistry, SelectionPolicy, discover_plugins
from vllm_fl.errors import AllFailedError, NoImplementationError
from vllm_fl.plugins.plugin import Plugin
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import AttentionImpl, AttentionRequest, OpImpl

PLUGINS = Path(__file__).parents[4] / "tests" / "plugins"
VENDORS = ("musa", "iluvatar")

pytestmark = pytest.mark.skipif(not PLUGINS.is_dir(), reason="outside of the repository")


@pytest.fixture(params=VENDORS)
def vendor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    module = f"fl_form_{request.param}"
    monkeypatch.syspath_prepend(PLUGINS / f"fl-form-{request.param}" / "src")
    monkeypatch.setenv("VLLM_FL_PLUGIN_MODULES", f"{module}.register_ops")
    monkeypatch.setenv("VLLM_FL_PLUGINS", "")
    yield request.param
    for name in [name for name in sys.modules if name.startswith(module)]:
        del sys.modules[name]


@pytest.fixture
def loaded(vendor: str) -> tuple[Plugin, OpRegistry]:
    registry = OpRegistry()
    loaded = [p for p in discover_plugins(registry) if p.status != "disabled"]
    (plugin,) = [p for p in loaded if p.kind == "backend"]
    return plugin, registry


class Norm:
    """The attributes of a norm's layer."""

    variance_epsilon = 1e-5
    variance_size_override = None
    has_weight = True

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.rand(16), requires_grad=False)
        self.hidden_size = 16


def test_it_loads_whole(vendor: str, loaded: tuple[Plugin, OpRegistry]) -> None:
    plugin, registry = loaded
    assert (plugin.status, plugin.error) == ("ok", None)
    ops = ["attention_backend", "rms_norm", "rotary_embedding", "silu_and_mul"]
    assert registry.list_operators() == ops
    for op in ops:
        (impl,) = registry.get_implementations(op)
        assert (impl.impl_id, impl.kind, impl.vendor) == (f"vendor.{vendor}", "vendor", vendor)
        assert impl.is_available()


def test_its_attention_backend_is_asked(vendor: str, loaded: tuple[Plugin, OpRegistry]) -> None:
    (impl,) = loaded[1].get_implementations("attention_backend")
    assert isinstance(impl, AttentionImpl) and callable(impl.class_path)
    path = impl.class_path(AttentionRequest(head_size=64, dtype=torch.bfloat16))
    assert path == "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend"


def test_with_a_layer_it_computes_and_leaves_a_scripts_tensors(
    loaded: tuple[Plugin, OpRegistry],
) -> None:
    manager = OpManager(loaded[1], SelectionPolicy())
    norm: Any = Norm()
    heads = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    angles = torch.rand(5, 3), torch.rand(5, 3), torch.tensor([4, 0, 2])
    for op, layer, call, provided in (
        ("rms_norm", norm, (torch.randn(3, 16), torch.randn(3, 16)), (norm.weight, 1e-5)),
        ("silu_and_mul", SimpleNamespace(), (torch.randn(3, 16),), ()),
        ("rotary_embedding", SimpleNamespace(), (*heads, *angles), ()),
    ):
        kept = [each.clone() for each in call]
        exact = known_contracts().contracts[op].oracle(*call, *provided)
        got = manager.call_as_method(op, layer, *call)
        if isinstance(got, torch.Tensor):
            got, exact = (got,), (exact,)
        for mine, wanted in zip(got, exact, strict=True):
            torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-5)
        assert all(map(torch.equal, call, kept))


def test_what_it_cannot_do_is_refused_by_name(
    vendor: str, loaded: tuple[Plugin, OpRegistry]
) -> None:
    manager = OpManager(loaded[1], SelectionPolicy())
    call = (torch.randn(1, 2, 8), None, torch.rand(5, 3), torch.rand(5, 3), torch.tensor([4]))
    with pytest.raises(NoImplementationError, match=r"needs the calling layer .*call_method_op"):
        manager.call("rotary_embedding", *call)
    if vendor == "musa":
        manager.call_as_method("rotary_embedding", SimpleNamespace(), *call, True)
    else:
        with pytest.raises(AllFailedError, match="has no parameter rotary_interleaved"):
            manager.call_as_method("rotary_embedding", SimpleNamespace(), *call, True)


def test_in_an_engines_hands_nothing_is_copied(
    vendor: str, loaded: tuple[Plugin, OpRegistry]
) -> None:
    (impl,) = loaded[1].get_implementations("rms_norm")
    assert isinstance(impl, OpImpl) and impl.needs_layer
    x, residual = torch.randn(3, 16), torch.randn(3, 16)
    manager = OpManager(loaded[1], SelectionPolicy())
    norm = manager.bind("rms_norm", Norm(), frozenset({"x", "residual"}))
    out, y = norm(x, residual)
    assert (out is x, y is residual) == ((True, True) if vendor == "musa" else (False, False))
