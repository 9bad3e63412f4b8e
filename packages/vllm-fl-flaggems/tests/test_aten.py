"""Which of PyTorch's operators are replaced, and the list file of them."""

from __future__ import annotations

import dataclasses
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_fl import SettingsError, WorkerContext, WorkerReport
from vllm_fl.settings.loading import load_settings
from vllm_fl_flaggems import aten, loading, plugin
from vllm_fl_flaggems.settings import SETTINGS

ALL_BUT = {"VLLM_FL_FLAGOS_BLACKLIST": "copy_,mul"}


class Gems(types.ModuleType):
    """FlagGems's registration, with its own names and no kernels."""

    __version__ = "5.0.2"
    FULL_CONFIG_BY_FUNC = {  # noqa: RUF012
        "softmax": [("_softmax", None)],
        "mul": [("mul.Tensor", None)],
        "mul_": [("mul_.Tensor", None)],
        **{"addmm": [("addmm", None)], "addmm_out": [("addmm.out", None, lambda: False)]},
        **{"addmm_dtype": [("addmm.dtype", None)], "addmv": [("addmv", None)]},
        "copy_": [("copy_", None)],
        "rms_norm": [],
    }
    ops = types.SimpleNamespace(__all__=["softmax", "mul", "copy_"])
    fused = types.SimpleNamespace(__all__=["topk_softmax", "silu_and_mul"])

    def __init__(self) -> None:
        super().__init__("flag_gems")
        self.calls: list[tuple[str, list[str]]] = []

    def enable(self, unused: list[str]) -> None:
        self.calls.append(("enable", unused))

    def only_enable(self, include: list[str]) -> None:
        self.calls.append(("only_enable", include))

    def all_registered_keys(self) -> list[str]:
        return ["softmax.int", "mul.Tensor"]


@pytest.fixture
def gems(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gems]:
    module = Gems()
    monkeypatch.setattr(loading, "loaded", [module])
    monkeypatch.setattr(aten, "_replaced", [])
    yield module


def context(tmp_path: Path, rank: int = 0, device: str = "cuda", **variables: str) -> WorkerContext:
    env = {"FLAGGEMS_ENABLE_OPLIST_PATH": str(tmp_path / "list.txt"), **variables}
    settings = load_settings(env, platform="cuda", plugins=SETTINGS)
    return WorkerContext(settings, torch.device(device), torch.bfloat16, rank, None)


def replaced(tmp_path: Path, **options: Any) -> WorkerReport:
    report = aten.replace_operators(context(tmp_path, **options))
    assert report is not None
    return report


def test_a_whitelist_is_all_that_is_enabled(gems: Gems, tmp_path: Path) -> None:
    report = replaced(tmp_path, VLLM_FL_FLAGOS_WHITELIST="softmax,silu_and_mul")
    assert gems.calls == [("only_enable", ["softmax"])]
    assert report.facts == {"flag_gems": "5.0.2", "aten": ["mul.Tensor", "softmax.int"]}
    assert (tmp_path / "list.txt").read_text() == "mul.Tensor\nsoftmax.int\n"


def test_the_list_of_what_is_left_out_says_which_operators_it_takes(
    gems: Gems, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (blacklist,) = [spec for spec in plugin.settings() if spec.key == "flagos_blacklist"]
    assert blacklist.known is not None
    manager = aten.get_default_manager()
    for variables, known in ((ALL_BUT, {*gems.FULL_CONFIG_BY_FUNC}), ({}, set())):
        settings, registry = context(tmp_path, **variables).settings, manager.registry
        of_engine = types.SimpleNamespace(settings=settings, registry=registry)
        monkeypatch.setattr(aten, "get_default_manager", lambda of_engine=of_engine: of_engine)
        assert {*blacklist.known()} == known


def test_a_whitelist_of_contracts_alone_touches_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(aten, "problem", lambda: pytest.fail("FlagGems was imported"))
    names = "silu_and_mul,gelu_and_mul,rms_norm,rotary_embedding,attention_backend"
    assert aten.replace_operators(context(tmp_path, VLLM_FL_FLAGOS_WHITELIST=names)) is None


def test_nothing_is_replaced_where_only_what_is_measured_may_serve(
    gems: Gems, tmp_path: Path
) -> None:
    """vLLM's batch-invariant mode overrides operators itself; FlagGems would undo that."""
    asking = dataclasses.replace(context(tmp_path), wants_invariance="VLLM_BATCH_INVARIANT=1")
    report = aten.replace_operators(asking)
    assert report is not None and report.facts == {"aten": []}
    assert "VLLM_BATCH_INVARIANT=1, and FlagGems's operators are not verified" in report.lines[0]
    assert gems.calls == [] and not (tmp_path / "list.txt").exists()
    aten.replace_operators(context(tmp_path, **ALL_BUT))
    with pytest.raises(RuntimeError, match="in its own process"):
        aten.replace_operators(asking)


@pytest.mark.parametrize(
    ("banned", "unused"),
    [
        ("copy_,mul", ["copy_", "mul", "mul_"]),
        ("addmm", ["addmm", "addmm_dtype", "addmm_out"]),
        ("addmm_out,rms_norm", ["addmm", "addmm_dtype", "addmm_out", "rms_norm"]),
    ],
)
def test_a_ban_covers_the_overloads_and_the_in_place_form_of_an_operator(
    gems: Gems, tmp_path: Path, banned: str, unused: list[str]
) -> None:
    aten.replace_operators(context(tmp_path, VLLM_FL_FLAGOS_BLACKLIST=banned))
    assert gems.calls == [("enable", unused)]


@pytest.mark.parametrize(("kind", "which"), [("blacklist", "all not in"), ("whitelist", "all in")])
def test_a_line_says_how_many_operators_are_replaced_by_which_list(
    gems: Gems, tmp_path: Path, kind: str, which: str
) -> None:
    """A blacklist of PyTorch's operators enables the replacement of all other operators."""
    variable = f"VLLM_FL_FLAGOS_{kind.upper()}"
    assert replaced(tmp_path, **{variable: "softmax"}).lines[0] == (
        f"FlagGems: 2 PyTorch operators replaced: {which} flagos_{kind} (environment "
        f"{variable}). To replace none, remove PyTorch's operators from this list"
    )


@pytest.mark.parametrize(
    "file", [None, "prefer: flagos", "flagos_blacklist: [silu_and_mul, attention_backend]"]
)
def test_without_a_list_of_its_own_ops_none_is_enabled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str | None
) -> None:
    monkeypatch.setattr(aten, "problem", lambda: pytest.fail("FlagGems was imported"))
    (tmp_path / "mine.yaml").write_text(f"{file}\n")
    variables = {"VLLM_FL_CONFIG": str(tmp_path / "mine.yaml")} if file else {}
    report = aten.replace_operators(context(tmp_path, **variables))
    if file is None:
        assert report is not None and report.facts == {"aten": []}
        assert "no list selects any (VLLM_FL_FLAGOS_WHITELIST, " in report.lines[0]
    for switched_off in ({"USE_FLAGGEMS": "false"}, {"device": "cpu"}):
        assert aten.replace_operators(context(tmp_path, **switched_off)) is None


@pytest.mark.parametrize("variable", ["VLLM_FL_FLAGOS_WHITELIST", "VLLM_FL_FLAGOS_BLACKLIST"])
def test_an_unknown_name_is_an_error_with_the_near_ones(
    gems: Gems, tmp_path: Path, variable: str
) -> None:
    with pytest.raises(SettingsError, match="softmax") as caught:
        aten.replace_operators(context(tmp_path, **{variable: "sofmax"}))
    assert "sofmax" in str(caught.value)
    assert gems.calls == []


def test_a_fused_op_in_a_whitelist_is_named_as_without_effect(gems: Gems, tmp_path: Path) -> None:
    report = replaced(tmp_path, VLLM_FL_FLAGOS_WHITELIST="softmax,topk_softmax")
    assert any("topk_softmax" in line and "ignored" in line for line in report.lines)


def test_a_flaggems_that_does_not_load_is_a_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(loading, "loaded", ["FlagGems does not import: RuntimeError: no device"])
    report = replaced(tmp_path, **ALL_BUT)
    assert "no device" in report.lines[0]
    assert report.facts == {"aten": []}


def test_a_second_engine_keeps_what_the_first_set(gems: Gems, tmp_path: Path) -> None:
    aten.replace_operators(context(tmp_path, **ALL_BUT))
    for variables in ({"VLLM_FL_FLAGOS_WHITELIST": "softmax"}, {}):
        assert "first engine" in replaced(tmp_path, **variables).lines[0]
        assert len(gems.calls) == 1


def test_only_the_first_rank_writes_the_list_and_a_failure_is_a_line(
    gems: Gems, tmp_path: Path
) -> None:
    aten.replace_operators(context(tmp_path, rank=1, **ALL_BUT))
    assert list(tmp_path.iterdir()) == []
    aten._replaced.clear()
    path = str(tmp_path / "missing" / "list.txt")
    report = replaced(tmp_path, FLAGGEMS_ENABLE_OPLIST_PATH=path, **ALL_BUT)
    assert any(path in line and "cannot write" in line for line in report.lines)


def test_a_link_is_replaced_and_never_followed(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "list.txt"
    victim.write_text("precious")
    link.symlink_to(victim)
    aten.write_list(link, ["mul.Tensor"])
    assert victim.read_text() == "precious"
    assert not link.is_symlink()
    assert link.read_text() == "mul.Tensor\n"


def test_a_list_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.write_text("old\n")

    def lines() -> Iterator[str]:
        yield "new"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        aten.write_list(path, lines())
    assert path.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["list.txt"]
