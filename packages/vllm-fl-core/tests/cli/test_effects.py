"""Which settings have no effect, for what is installed."""

from __future__ import annotations

from vllm_fl.cli._effects import find_idle
from vllm_fl.plugins.plugin import Plugin
from vllm_fl.plugins.registry import Owner
from vllm_fl.settings.loading import load_settings


def test_flagcx_path_has_an_effect_where_its_distribution_is_installed() -> None:
    settings = load_settings({"FLAGCX_PATH": "/opt/cx"})
    here, elsewhere = (
        Plugin(Owner("x", distribution, "0.1.0"), "x", "ok")
        for distribution in ("vllm-fl-flagcx", "vllm-fl-acme")
    )
    assert list(find_idle(settings, [here], ())) == []
    (finding,) = find_idle(settings, [elsewhere], ())
    assert "FLAGCX_PATH=/opt/cx" in finding.what and "vllm-fl-flagcx" in finding.todo
