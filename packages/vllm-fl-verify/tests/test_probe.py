"""Our forward pass over a loaded model: its inputs, and the state it leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from builders import engine_of, managing, planning, silu
from vllm import forward_context
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.sequence import IntermediateTensors

from vllm_fl.integration import engines
from vllm_fl.integration.patchers import attention
from vllm_fl.plugins.inspection import Moment
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.plugins.types import BackendImplKind, OpImpl
from vllm_fl_verify import loaded, probe
from vllm_fl_verify.made_inputs import checks_of


class Attention(torch.nn.Module, AttentionLayerBase):
    def get_attn_backend(self) -> Any:
        raise NotImplementedError

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        raise NotImplementedError

    def forward(self, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.full_like(query, float("nan"))  # uninitialised memory


class Model(torch.nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.attention, self.fails = Attention(), fails
        self.given: dict[str, Any] = {}

    def forward(self, **given: Any) -> Any:
        self.given = given
        self.skips = get_forward_context().skip_compiled
        self.inference = torch.is_inference_mode_enabled()
        self.attended = self.attention(torch.ones(8, 4), torch.arange(32.0).view(8, 4))
        if self.fails:
            raise ZeroDivisionError

    def embed_input_ids(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.float().unsqueeze(-1).expand(-1, 4)


class Older:
    """The used part of vLLM's first model runner."""

    def __init__(self, model: Model, config: VllmConfig, **given: torch.Tensor) -> None:
        self.model, self.config = model, config
        self.given: dict[str, Any] = {"input_ids": torch.zeros(64, dtype=torch.int32), **given}

    def _dummy_run(
        self, num_tokens: int, is_profile: bool = False, skip_eplb: bool = False
    ) -> None:
        assert is_profile and skip_eplb
        with set_forward_context(None, self.config, num_tokens=num_tokens):
            self.model(positions=torch.zeros(3, 64, dtype=torch.int64), **self.given)


class Newer(Older):
    """The second runner, which does not support a profile run with attention."""

    def _dummy_run(  # type: ignore[override]
        self, num_tokens: int, *args: Any, skip_attn: bool = False, **options: Any
    ) -> None:
        assert skip_attn
        super()._dummy_run(num_tokens, **options)


class WithAttention(Older):
    """The first runner, if it must build attention's metadata."""

    def _dummy_run(  # type: ignore[override]
        self, num_tokens: int, *, force_attention: bool = False, **options: bool
    ) -> None:
        assert force_attention and num_tokens == 1
        super()._dummy_run(num_tokens, **options)


@pytest.fixture
def config() -> VllmConfig:
    made = VllmConfig()
    model = SimpleNamespace(get_vocab_size=lambda: 1000, max_model_len=64)
    object.__setattr__(made, "model_config", model)
    return made


def left_clean(model: Model) -> bool:
    hooks = [part._forward_hooks for part in model.modules()]
    own = forward_context.create_forward_context.__module__ == forward_context.__name__
    return "forward" not in vars(model) and not any(hooks) and own


def ran(config: Any, runner: Any = Older, **given: Any) -> Model:
    model = Model()
    assert probe.forward(runner(model, config, **given), {"": model}, config, 8) == ""
    return model


@pytest.mark.parametrize("runner", [Older, Newer])
def test_tokens_and_positions_are_varied_and_nothing_is_left(runner: Any, config: Any) -> None:
    model = ran(config, runner)
    ids, positions = model.given["input_ids"], model.given["positions"]
    assert ids.dtype == torch.int32 and len(set(ids.tolist())) > 4 and int(ids.max()) > 64
    assert positions.shape == (3, 64) and 0 <= int(positions.min()) <= int(positions.max()) < 64
    steps = positions.diff(dim=-1)
    assert bool((steps == 1).any()) and bool((steps < 0).any()), "prompts one behind another"
    assert bool((ids.diff() == 0).any()), "tokens that repeat"
    assert model.skips and model.inference
    assert left_clean(model)
    assert torch.equal(ran(config, runner).given["input_ids"], ids), "as on other ranks"


class Rope(torch.nn.Module):
    def __init__(self, rows: int, name: str = "cos_sin_cache", **fields: int) -> None:
        super().__init__()
        self.register_buffer(name, torch.zeros(rows, 4))
        vars(self).update(fields)


def table(rows: int, **fields: int) -> torch.nn.Module:
    found = torch.nn.Embedding(rows, 4)
    vars(found).update(fields)
    return found


@pytest.mark.parametrize(
    ("layers", "positions"),
    [
        ({}, 512),
        ({"rope": Rope(128), "other": Rope(256)}, 128),
        ({"rope": Rope(160, "long_short_cos_sin_cache", original_max_position_embeddings=64)}, 96),
        ({"chunked": Rope(8, "cos_sin_q_cache")}, 512),
        ({"wpe": table(100)}, 100),
        ({"embed_positions": table(102, offset=2)}, 100),
        ({"rope": Rope(0)}, 1),
    ],
)
def test_positions_stay_within_every_table_of_the_model(
    layers: dict[str, torch.nn.Module], positions: int, config: Any
) -> None:
    """With VLLM_ALLOW_LONG_MAX_MODEL_LEN an engine may be longer than its model."""
    model = Model()
    for name, layer in layers.items():
        model.add_module(name, layer)
    assert probe.positions_of(model, 512) == positions
    config.model_config.max_model_len = 512
    assert probe.forward(Older(model, config), {"": model}, config, 8) == ""
    assert int(model.given["positions"].max()) < positions


def test_positions_behind_padding_and_those_of_an_encoder_of_images() -> None:
    roberta = torch.nn.Module()
    roberta.padding_idx = 1  # type: ignore[assignment]
    roberta.add_module("position_embeddings", table(514))
    assert probe.positions_of(roberta, 8192) == 512
    seeing = torch.nn.Module()
    seeing.add_module("tower", Rope(16))
    seeing.add_module("language", Rope(64))
    assert probe.positions_of(seeing, 512) == 16
    seeing.get_language_model = lambda: seeing.language  # type: ignore[assignment]
    assert probe.positions_of(seeing, 512) == 64


def test_attention_gives_numbers_of_its_inputs_size(config: Any) -> None:
    attended = ran(config).attended
    assert bool(attended.isfinite().all()) and 2.0 < float(attended.std()) < 40.0


def test_embeddings_are_those_of_random_tokens(config: Any) -> None:
    model = ran(config, input_ids=None, inputs_embeds=torch.zeros(64, 4))
    embeds = model.given["inputs_embeds"]
    assert model.given["input_ids"] is None and len(embeds[:, 0].unique()) > 4
    assert torch.equal(embeds[:, 0], embeds[:, 3])


def test_a_later_rank_of_a_pipeline_is_given_noise_for_what_the_rank_before_sends(
    config: Any,
) -> None:
    sent = IntermediateTensors({"hidden_states": torch.zeros(8, 4), "residual": torch.zeros(8, 4)})
    given = ran(config, intermediate_tensors=sent).given["intermediate_tensors"]
    assert type(given) is IntermediateTensors and given.tensors.keys() == sent.tensors.keys()
    assert all(len(tensor.unique()) == 32 for tensor in given.tensors.values())
    assert not any(bool(tensor.any()) for tensor in sent.tensors.values()), "vLLM's own buffers"


class Drafting(Older):
    """Runs a draft model after its model, like speculative decoding."""

    def __init__(self, model: Model, config: VllmConfig, draft: object) -> None:
        super().__init__(model, config)
        self.draft = draft

    def get_draft_model(self) -> object:
        return self.draft

    def _dummy_run(self, num_tokens: int, **options: Any) -> None:  # type: ignore[override]
        super()._dummy_run(num_tokens, **options)
        if isinstance(self.draft, torch.nn.Module):
            with set_forward_context(None, self.config, num_tokens=num_tokens):
                positions = torch.zeros(64, dtype=torch.int64)
                hidden = torch.zeros(8, 4)
                self.draft(positions=positions, hidden_states=hidden, **self.given)


def engine_with(runner: Drafting, config: Any) -> Any:
    oracle = known_contracts().contracts["merge_attn_states"].oracle
    behind = OpImpl("merge_attn_states", "vendor.acme", BackendImplKind.VENDOR, oracle, "acme")
    plan = planning(managing(silu("vendor.acme"), behind))
    worker = SimpleNamespace(
        model_runner=runner, vllm_config=config, get_model=lambda: runner.model
    )
    engine = engine_of(plan)
    engine.worker = worker
    return engine


@pytest.mark.parametrize(
    ("draft", "line"),
    [
        (Model(fails=True), "not verified on live tensors: the forward pass failed: Zero"),
        (None, "0 calls on live tensors in"),
    ],
    ids=["failing", "none"],
)
def test_with_speculative_decoding_the_start_goes_on(
    draft: Any, line: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the draft model cannot run before vLLM has created its inputs."""
    monkeypatch.setattr(engines, "exchange", lambda what, mine, failure="": [mine])
    model = Model()
    engine = engine_with(Drafting(model, config, draft), config)
    checks_of(engine).live_counts = frozenset({8})
    assert loaded.compare_loaded(engine) == {}
    (said,) = engine.remarks[Moment.LOADED]
    assert said.startswith(line)
    unseen = "; not compared: merge_attn_states (not called)"
    assert said.endswith(unseen) is not line.startswith("not")
    assert model.given and not engine.disabled
    assert left_clean(model) and (not isinstance(draft, Model) or left_clean(draft))


def test_a_draft_model_has_the_same_stand_ins_as_its_target(config: Any) -> None:
    model, draft = Model(), Model()
    models = {"": model, "(draft model) ": draft}
    assert probe.forward(Drafting(model, config, draft), models, config, 8) == ""
    assert bool(draft.attended.isfinite().all()), "its attention has not run either"
    assert int(draft.given["positions"].max()) > 0 and len(draft.given["input_ids"].unique()) > 4
    assert len(draft.given["hidden_states"].unique()) == 32
    assert left_clean(draft)


def test_attention_is_run_once_uncompiled_where_vllm_would_not(config: Any) -> None:
    model = Model()
    attention.attend(WithAttention(model, config), config, is_eager=False)
    assert model.skips and model.inference and left_clean(model)
    asked: list[dict[str, bool]] = []

    def newer(tokens: int, skip_attn: bool = True, **options: bool) -> None:
        asked.append({"skip_attn": skip_attn, **options})

    for is_eager in (True, False):  # otherwise the newer runner runs other steps
        attention.attend(SimpleNamespace(_dummy_run=newer), config, is_eager=is_eager)
    assert asked == [{"skip_attn": False, "skip_eplb": True}]


def test_without_a_forward_the_reason_is_reported(config: Any) -> None:
    model = Model()
    assert probe.forward(object(), {"": model}, config, 8) == "the model runner has no dummy run"
    nothing = SimpleNamespace(_dummy_run=lambda tokens, **options: None)
    assert probe.forward(nothing, {"": model}, config, 8) == "vLLM ran no forward pass"
