"""Another distribution's platform plugin beside ours: one line that says what to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm_fl.errors import PluginError
from vllm_fl.integration.device import other_platforms

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """`install(body)`: the distribution vllm-acme, whose platform plugin `acme` runs `body`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)

    def make(body: str) -> None:
        info = tmp_path / "vllm_acme-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-acme\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[vllm.platform_plugins]\nacme = {tmp_path.name.replace('-', '_')}_acme:register\n"
        )
        module = tmp_path / f"{tmp_path.name.replace('-', '_')}_acme.py"
        module.write_text(f"def register():\n    {body}\n")

    return make


def test_one_that_answers_is_named_with_what_to_do(
    install: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("return 'acme.platform.AcmePlatform'")
    (line,) = other_platforms()
    assert "vllm-acme brings a platform of vLLM's too ('acme': acme.platform.AcmePlatform)" in line
    assert "pip uninstall -y vllm-acme" in line
    assert "VLLM_PLUGINS=fl for vllm-fl, VLLM_PLUGINS=acme for vllm-acme" in line
    assert "\n" not in line
    monkeypatch.setenv("VLLM_PLUGINS", "fl,acme")
    assert len(other_platforms()) == 1
    for chosen in ("fl", "fl,acmes", ""):
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
        assert other_platforms() == ()


@pytest.mark.parametrize("body", ["return None", "raise ImportError('no CANN')"])
def test_one_that_does_not_answer_is_no_obstacle(install: Callable[[str], None], body: str) -> None:
    install(body)
    assert other_platforms() == ()


def test_it_is_asked_once_and_in_silence(
    install: Callable[[str], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """vLLM asks us twice, and the other one itself: what that logs must not stand there thrice."""
    asked = tmp_path / "asked"
    install(
        f"import logging; open({str(asked)!r}, 'a').write('x'); "
        "logging.getLogger('acme').warning('acme declines'); "
        "logging.getLogger('acme').error('acme is broken'); return 'acme.platform.AcmePlatform'"
    )
    assert other_platforms() == other_platforms() != ()
    assert asked.read_text() == "x"
    assert [record.getMessage() for record in caplog.records] == ["acme is broken"]
    logging.getLogger("acme").warning("again")
    assert "again" in caplog.text, "what it says to vLLM is heard"
    assert "declines" not in capfd.readouterr().err


@needs_vllm
def test_the_platform_is_not_given_to_vllm_beside_another(install: Callable[[str], None]) -> None:
    from vllm_fl.integration.platform import overlay_path

    assert overlay_path() is not None
    install("return 'acme.platform.AcmePlatform'")
    with pytest.raises(PluginError, match="pip uninstall -y vllm-acme") as error:
        overlay_path()
    assert error.value.distribution == "vllm-acme"
