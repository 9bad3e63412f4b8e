"""Faulty calls that an engine keeps, and `vllm-fl verify --replay` of them."""

from __future__ import annotations

import errno
import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import BoundLayer, managing, planning
from commands import Command, Plugin

from vllm_fl.contracts import ModelSizes, Sample
from vllm_fl.dispatch import get_default_manager, reset_default_manager
from vllm_fl.engine.plan import Plan
from vllm_fl.errors import SettingsError
from vllm_fl.plugins.inspection import Moment
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings.loading import load_settings
from vllm_fl_tools.atomic_write import Draft
from vllm_fl_tools.operate import faults
from vllm_fl_tools.operate.faults import Faults
from vllm_fl_tools.operate.plugin import inspect_plan
from vllm_fl_verify.guarded import bits
from vllm_fl_verify.live import Live
from vllm_fl_verify.preflight import find_faults
from vllm_fl_verify.shadow import Shadow
from vllm_fl_verify.trials import Request, Role
from vllm_fl_verify.verification import tried

OP, CPU = "silu_and_mul", torch.device("cpu")
KEY = OP, "vendor.acme"
FILE = "silu_and_mul.vendor.acme.rank0.safetensors"
KERNELS = """
def acme(x):
    found = silu_and_mul(x)
    found[..., COLUMN % found.shape[-1]] += 2.0
    if RAISES:
        raise OSError("the device table is missing")
    return found

@hookimpl
def register_ops():
    return [act("acme", acme), act("plain")]
"""


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of a file, once it is written."""
    written()
    return faults.read(path)


def written() -> None:
    for thread in threading.enumerate():
        if thread.name == "vllm-fl-fault":
            thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "faults"


class Engine(SimpleNamespace):
    """The attributes of an engine that the keeper reads."""

    def __init__(self, folder: Path, *, most: str = "64", rank: int = 0, **fields: Any) -> None:
        env = {"VLLM_FL_KEEP_FAULTS": str(folder), "VLLM_FL_KEEP_FAULTS_MB": most}
        facts = SimpleNamespace(settings=load_settings(env))
        fixed = {"facts": facts, "rank": rank, "replica": 0, "device": CPU, "status": "starting"}
        super().__init__(**fixed, **{"models": {}, **fields})


def planned(plugin: Plugin, seed: int, *, raises: bool = False) -> Any:
    """A plan with `vendor.acme` first, which is incorrect in a drawn column or raises."""
    plugin(f"RAISES, COLUMN = {raises}, {random.Random(seed).randrange(512)}\n{KERNELS}")
    reset_default_manager()
    manager = get_default_manager()
    manager.ensure_initialized()
    impls = manager.registry.snapshot().impls_by_op[OP]
    return planning(managing(*impls, per_op_order={OP: ["vendor:acme", "vendor:plain"]}))


def bound(plan: Plan) -> Callable[..., Any]:
    return plan.bind(OP, SimpleNamespace(), frozenset())


def strided() -> torch.Tensor:
    """Rows in a wider tensor, as layers pass them; their neighbours are not kept."""
    return torch.randn(9, 96, dtype=torch.bfloat16)[:, 16:80]


def at_startup(plan: Plan, _: torch.Tensor) -> str:
    impl = plan.entries[OP].impls[0]
    sizes = ModelSizes(64, 64, tokens=(1, 16))
    keeper = plan.record.keeper
    found = find_faults(Request([Role(impl)], torch.bfloat16, CPU, sizes, keeper=keeper))
    return found.objections[KEY].reason


def live(plan: Plan, x: torch.Tensor) -> str:
    act = BoundLayer(plan)
    found = Live(plan, {"": act}, CPU)
    with found.watching():
        act(x)
    return found.objections[KEY].reason


def in_shadow(plan: Plan, x: torch.Tensor) -> str:
    shadow = Shadow(plan, 1.0)
    act = bound(plan)
    with shadow.comparing():
        act(x)
    return shadow.kept[KEY]


def in_a_run(plan: Plan, x: torch.Tensor) -> str:
    with pytest.raises(OSError, match="the device table is missing"):
        bound(plan)(x)
    return FILE  # its own log line has the file


@pytest.mark.parametrize("seen", [at_startup, live, in_shadow, in_a_run])
def test_a_faulty_call_is_kept_and_repeated_on_every_implementation(
    seen: Any, fl: Command, plugin: Plugin, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    plan = planned(plugin, seed, raises=seen is in_a_run)
    plan.record.keeper = Faults(Engine(folder))
    x = strided()
    assert FILE in seen(plan, x)
    tensors, facts = read(folder / FILE)
    assert f"kept the first faulty call of 'vendor.acme' for op '{OP}' (rank 0)" in caplog.text
    assert [each.name for each in folder.iterdir()] == [FILE]
    if seen is not at_startup:
        (kept,) = faults.unpacked(folder / FILE, tensors, facts, plan.contracts[OP], CPU).args
        assert torch.equal(kept, x) and kept.stride() == x.stride()
        assert tensors["x"].shape == x.shape, "no other columns of the tensor that it is a view of"
    done = fl("verify", "--replay", str(folder / FILE), "--json")
    found = {each["impl_id"]: each for each in done.json()["results"]}
    (bad,), (good,) = (found[f"vendor.{name}"]["findings"] for name in ("acme", "plain"))
    verdict = "raised" if seen is in_a_run else "wrong"
    assert (done.status, bad["status"], good["status"]) == (1, verdict, "ok")
    assert found["vendor.plain"]["worst"] <= 1 and ": got " in good["reason"], good
    assert seen is in_a_run or (found["vendor.acme"]["worst"] > 1 and ": got " in bad["reason"])
    done = fl("verify", "--replay", str(folder / FILE), "--impl", "vendor.plain")
    assert done.status == 0 and f"{OP} vendor.acme: " in done.out, done


def test_a_call_that_is_not_supported_is_replaced_by_one_that_fails(
    plugin: Plugin, folder: Path
) -> None:
    plan = planned(plugin, 0)
    first, plain = plan.entries[OP].impls
    keeper = Faults(Engine(folder))
    sample = Sample("a call", (torch.ones(2, 8),))

    def keep(impl: OpImpl, reason: str, **how: Any) -> str:
        return keeper.keep(plan.contracts[OP], impl, reason, lambda: sample, **how)

    def reason() -> str:
        found: str = read(folder / FILE)[1]["reason"]
        return found

    assert FILE in keep(first, "odd", refused=True) and reason() == "odd"
    assert keep(first, "even", refused=True) == ""
    assert FILE in keep(first, "wrong") and reason() == "wrong"
    assert keep(first, "odd", refused=True) == keep(first, "also wrong") == ""
    assert reason() == "wrong"
    keep(plain, "wrong")
    Faults(Engine(folder, rank=1)).keep(plan.contracts[OP], first, "wrong", lambda: sample)
    written()
    others = {FILE.replace("acme", "plain"), FILE.replace("rank0", "rank1")}
    assert {each.name for each in folder.iterdir()} == {FILE, *others}


def test_each_plan_of_an_engine_has_the_same_keeper_and_without_the_setting_none(
    folder: Path,
) -> None:
    engine = Engine(folder, state={}, plan=planning(managing()))
    keepers = []
    for _ in range(2):
        inspect_plan(engine, Moment.PLANNED)
        keepers.append(engine.plan.record.keeper)
        engine.plan = planning(managing())
    assert keepers[0] is keepers[1] is not None
    engine.facts.settings = load_settings({})
    inspect_plan(engine, Moment.PLANNED)
    assert engine.plan.record.keeper is None


@pytest.mark.parametrize("text", ["0", "-1", "64 MB", "1.5"])
def test_the_limit_is_a_number_of_megabytes(text: str) -> None:
    with pytest.raises(SettingsError, match=r"VLLM_FL_KEEP_FAULTS_MB: .*expected a number of meg"):
        load_settings({"VLLM_FL_KEEP_FAULTS_MB": text})


def error(fl: Command, path: Path) -> str:
    """The one line that the command prints for a file that cannot be repeated."""
    status, printed, message = astuple(fl("verify", "--replay", str(path)))
    assert (status, printed, message.count("\n")) == (2, "", 1), message
    return str(message)


def samples() -> Iterator[tuple[Any, Sample]]:
    for spec in known_contracts().contracts.values():
        dtype = getattr(torch, spec.dtypes[-1])
        yield from ((spec, sample) for sample in tried(spec, dtype, CPU))


def test_arguments_keep_their_values_strides_and_dtypes(tmp_path: Path) -> None:
    """All samples of all contracts: strided, fp8, empty."""
    dtypes = set()
    for spec, sample in samples():
        tensors, facts = faults.pack_call(spec, sample, 2**30, lambda weight: {})
        path = tmp_path / "a.safetensors"
        path.write_bytes(faults.contents(tensors, facts))
        again = faults.unpacked(path, *read(path), spec, CPU)
        where = f"{spec.name}, {sample.name}"
        for name, before in spec.named(sample.args).items():
            after = spec.named(again.args)[name]
            if not isinstance(before, torch.Tensor):
                assert after == before, (where, name)
                continue
            dtypes.add(before.dtype)
            assert (after.dtype, after.shape) == (before.dtype, before.shape), (where, name)
            assert after.stride() == before.stride() or 0 in before.stride(), (where, name)
            pair = [bits(each.contiguous()) for each in (before, after)]
            if "shuffled" in facts["args"][name]:
                pair = [each.sort(0).values for each in pair]
            assert torch.equal(*pair), (where, name)
        assert ([*again.open_rows], again.scale) == ([*sample.open_rows], sample.scale), where
    assert {torch.float8_e4m3fn, torch.bfloat16, torch.int32, torch.int64} <= dtypes


def test_positions_lose_their_rows_and_no_contract_has_ids_of_tokens() -> None:
    specs = known_contracts().contracts
    names = {name for spec in specs.values() for name in spec.parameters}
    assert not names & {"input_ids", "token_ids", "prompt_token_ids"}
    spec = specs["rotary_embedding"]
    sample = next(s for s in tried(spec, torch.bfloat16, CPU) if spec.tokens(s.args) > 30)
    tensors, facts = faults.pack_call(spec, sample, 2**30, lambda weight: {})
    assert [name for name, about in facts["args"].items() if "shuffled" in about] == [
        "position_ids"
    ]
    before = spec.named(sample.args)["position_ids"]
    assert not torch.equal(tensors["position_ids"], before)


def test_a_large_call_is_kept_with_fewer_rows_or_without_some_elements(
    fl: Command, plugin: Plugin, folder: Path
) -> None:
    plan = planned(plugin, 1)
    keeper = Faults(Engine(folder, most="1"))
    x = torch.randn(5000, 128)  # 2.6 MB
    impl = plan.entries[OP].impls[0]
    keeper.keep(plan.contracts[OP], impl, "wrong", lambda: Sample("a call", (x,)))
    written()
    done = fl("verify", "--replay", str(folder / FILE))
    assert "rows: 1250 of 5000" in done.out
    assert (folder / FILE).stat().st_size < 1_010_000
    keeper = Faults(Engine(folder, most="1"))
    spec = plan.contracts["linear"]
    made = Sample("a call", (torch.randn(4, 1024), torch.randn(1024, 1024), None))
    linear = OpImpl("linear", "vendor.acme", impl.kind, impl.fn, "acme")
    keeper.keep(spec, linear, "wrong", lambda: made)
    written()
    message = error(fl, folder / FILE.replace(OP, "linear"))
    assert "has no valid weight (1024, 1024) float32: it needs a higher limit" in message


def test_a_large_weight_refers_to_the_checkpoint(tmp_path: Path, folder: Path) -> None:
    from safetensors.torch import save_file

    spec = known_contracts().contracts["linear"]
    same, merged = torch.nn.Linear(1024, 512), torch.nn.Linear(1024, 512)
    model = torch.nn.ModuleDict({"same": same, "merged": merged})
    save_file(
        {"same.weight": same.weight.detach(), "merged.weight": torch.randn(512, 1024)},
        tmp_path / "model.safetensors",
    )
    config = SimpleNamespace(model_config=SimpleNamespace(model=str(tmp_path)))
    find = Faults(Engine(folder, models={"": model}, config=config))._find
    weight, x = same.weight.data, torch.randn(3, 1024)
    tensors, facts = faults.pack_call(spec, Sample("a call", (x, weight, None)), 2**30, find)
    assert tensors.keys() == {spec.parameters[0]}
    path = tmp_path / "kept.safetensors"
    again = faults.unpacked(path, tensors, facts, spec, CPU)
    assert torch.equal(again.args[1], weight)
    other = Sample("a call", (x, merged.weight.data, None))
    assert len(faults.pack_call(spec, other, 2**30, find)[0]) == 2
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"it needs same\.weight of model\.safetensors"):
        faults.unpacked(path, tensors, facts, spec, CPU)


@pytest.mark.parametrize("problem", ["folder", "disk"])
def test_what_cannot_be_written_gives_one_warning_and_nothing_else(
    problem: str,
    plugin: Plugin,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    plan = planned(plugin, 2)
    if problem == "folder":
        folder.write_text("a file")
    else:
        monkeypatch.setattr(Draft, "put", full)
    plan.record.keeper = Faults(Engine(folder))
    live(plan, strided())
    written()
    x = torch.randn(4, 64)
    assert torch.equal(bound(plan)(x), plan.entries[OP].impls[0].fn(x))
    found = [each for each in caplog.records if each.levelno >= logging.WARNING]
    (line,) = (each.getMessage() for each in found)
    assert line.startswith(f"VLLM_FL_KEEP_FAULTS: a call cannot be kept in {folder} (")


def test_a_file_that_cannot_be_repeated_is_one_error(
    fl: Command, plugin: Plugin, folder: Path
) -> None:
    plan = planned(plugin, 3)
    plan.record.keeper = Faults(Engine(folder))
    live(plan, strided())
    written()
    good, path = (folder / FILE).read_bytes(), folder / "other.safetensors"
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)

    def of(data: bytes) -> str:
        path.write_bytes(data)
        return error(fl, path)

    header = 8 + int.from_bytes(good[:8], "little")
    assert "is not a file of VLLM_FL_KEEP_FAULTS, or is damaged" in of(
        good[: rng.randrange(header)]
    )
    assert "or is damaged" in of(good[: rng.randrange(header, len(good))])
    at = rng.randrange(header, len(good))
    flipped = bytes([good[at] ^ 1 << rng.randrange(8)])
    assert "has no valid x (9, 64) bfloat16" in of(good[:at] + flipped + good[at + 1 :])
    at = good.index(b"bfloat16", 0, header)
    assert "another checksum" in of(good[:at] + b"bfloat17" + good[at + 8 :])
    tensors, facts = faults.read(folder / FILE)
    older = {**facts, "schemas": ["(Tensor y) -> Tensor"]}
    expected = f"was kept with another version of the op {OP}: ['(Tensor y) -> Tensor']"
    assert expected in of(faults.contents(tensors, older))
    other = {**facts, "op": "silu_and_mux"}
    assert "provides the op silu_and_mux" in of(faults.contents(tensors, other))
    assert "or is damaged" in of(good.replace(b"vllm_fl_fault_1", b"vllm_fl_fault_2"))
