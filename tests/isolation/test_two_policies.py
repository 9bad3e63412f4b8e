"""Two vendors with a policy for one platform: installing the second does not disable the first."""

from __future__ import annotations

import pytest

from installed import Install, Installed

BOTH = ("fl-left", "fl-right")


@pytest.fixture(params=[BOTH, pytest.param(BOTH[::-1], marks=pytest.mark.slow)], ids="+".join)
def both(install: Install, request: pytest.FixtureRequest) -> Installed:
    """Core and both vendors, installed in either order."""
    return install(*request.param)


def test_the_orders_merge_whatever_was_installed_first(both: Installed) -> None:
    plugins = both.plugins()
    assert {name: plugin["status"] for name, plugin in plugins.items()} == dict.fromkeys(BOTH, "ok")
    eager = both.explained("silu_and_mul")
    assert eager["order"] == ["vendor:left", "vendor:right", "stock", "reference"]
    assert eager["selected"] == "vendor.left"
    eager = both.explained("rms_norm")
    assert eager["order"] == ["vendor:right", "vendor", "stock", "reference"]


def test_a_setting_on_which_they_differ_has_its_default(both: Installed) -> None:
    policy = both.answer("settings", status=0)
    assert policy["platform_files"]
    rows = {row["key"]: row for row in policy["settings"]}
    assert rows["strict"]["value"] is False
    assert rows["flagos_blacklist"]["value"] == ["mm", "add"]
    assert len(rows["strict"]["overrides"]) >= 2 and "differ" in rows["strict"]["origin"]
    decided = {"VLLM_FL_PER_OP": "silu_and_mul=vendor:right|stock", "VLLM_FL_STRICT": "1"}
    assert both.explained("silu_and_mul", **decided)["selected"] == "vendor.right"
