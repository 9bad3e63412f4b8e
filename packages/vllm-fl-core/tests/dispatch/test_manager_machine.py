"""Test calls, fallback, demotion, clearing and policies against a model, with random failures.

Each implementation returns its own multiple of its inputs, so a result shows which one ran and that
its inputs were unmodified.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from builders import managing, norm
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from vllm_fl.dispatch.context import policy_context
from vllm_fl.errors import AllFailedError, CallError, NoImplementationError
from vllm_fl.settings.policy import SelectionPolicy

# impl id -> (factor, whether it overwrites its inputs)
IMPLS = {
    "default.flagos": (2.0, False),
    "reference.slow": (3.0, False),
    "reference.torch": (5.0, False),
    "vendor.acme": (7.0, True),
    "vendor.beta": (11.0, True),
}
TRIED = {
    "flagos": ["default.flagos", "vendor.acme", "vendor.beta", "reference.slow", "reference.torch"],
    "vendor": ["vendor.acme", "vendor.beta", "default.flagos", "reference.slow", "reference.torch"],
    "reference": [
        "reference.slow",
        "reference.torch",
        "default.flagos",
        "vendor.acme",
        "vendor.beta",
    ],
}
MOODS = ["works", "raises", "raises", "refuses", "not implemented", "out of memory"]
GARBAGE = -1e30


class Broken(Exception):
    """The exception that implementations raise."""


def one_each(moods: list[str]) -> st.SearchStrategy[list[str]]:
    """A mood for each implementation."""
    return st.lists(st.sampled_from(moods), min_size=len(IMPLS), max_size=len(IMPLS))


class Layer:
    weight = torch.ones(4)
    variance_epsilon = 1e-6


class Machine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.moods = dict.fromkeys(IMPLS, "works")
        self.errors: list[BaseException] = []
        self.ran: list[str] = []
        self.demoted: set[str] = set()
        self.fallbacks: dict[tuple[str, str], int] = {}
        self.policy = SelectionPolicy()
        self.override: SelectionPolicy | None = None
        self.manager = managing(
            *(
                norm(
                    impl_id,
                    lambda x, residual, impl_id=impl_id: self.run(impl_id, x, residual),
                    verdict=lambda impl_id=impl_id: self.supports(impl_id),
                    consumes={"x", "residual"} if IMPLS[impl_id][1] else (),
                )
                for impl_id in IMPLS
            )
        )

    # The implementations.

    def supports(self, impl_id: str) -> bool | str:
        return "not today" if self.moods[impl_id] == "refuses" else True

    def run(self, impl_id: str, x: Any, residual: Any) -> Any:
        self.ran.append(impl_id)
        factor, consumes = IMPLS[impl_id]
        consumes = consumes and residual is not None  # otherwise there is no input to write into
        mood = self.moods[impl_id]
        if mood == "not implemented":
            raise NotImplementedError(f"{impl_id} has no kernel")
        whole = (x * factor).clone(), None if residual is None else (residual * factor).clone()
        if consumes:
            x.view(-1)[: x.numel() // 2] = GARBAGE  # a partial write
        if mood == "raises":
            raise self.kept(Broken(f"{impl_id} broke"))
        if mood == "out of memory":
            raise self.kept(RuntimeError(f"{impl_id}: CUDA out of memory"))
        if consumes:
            x.fill_(GARBAGE)
            residual.fill_(GARBAGE)
        return whole[0] if residual is None else whole

    def kept(self, error: Exception) -> Exception:
        self.errors.append(error)
        return error

    # The model.

    def predict(self, mistaken: bool, overwrites: bool) -> tuple[str, Any]:
        """Predict (outcome, implementation) of one call; update the demotions and counts."""
        policy = self.override or self.policy
        tried = [i for i in TRIED[policy.prefer] if i not in self.demoted]
        if not tried:
            return "nothing left", sorted(self.demoted)
        causes = []
        for place, impl_id in enumerate(tried):
            mood = self.moods[impl_id]
            if mood == "works":
                if place:
                    key = ("rms_norm", impl_id)
                    self.fallbacks[key] = self.fallbacks.get(key, 0) + 1
                return "result", impl_id
            if mood == "out of memory":
                return "sticky", impl_id
            refuses = mood in ("refuses", "not implemented")
            if mistaken and not refuses:
                return "mistake", None
            if refuses:
                causes.append(impl_id)
                if policy.strict:
                    return ("mistake", None) if mistaken else ("all failed", causes)
                continue
            if policy.strict or (overwrites and IMPLS[impl_id][1]):
                return "raised", impl_id
            self.demoted.add(impl_id)
            causes.append(impl_id)
        return ("mistake", None) if mistaken else ("all failed", causes)

    # The rules.

    @rule(impl_id=st.sampled_from(sorted(IMPLS)), mood=st.sampled_from(MOODS))
    def set_mood(self, impl_id: str, mood: str) -> None:
        self.moods[impl_id] = mood

    @rule(moods=one_each(MOODS))
    def set_moods(self, moods: list[str]) -> None:
        self.moods = dict(zip(sorted(IMPLS), moods, strict=True))

    @rule(moods=one_each(["raises", "refuses", "not implemented"]))
    def let_nothing_work(self, moods: list[str]) -> None:
        for (impl_id, (_, consumes)), mood in zip(IMPLS.items(), moods, strict=True):
            self.moods[impl_id] = "refuses" if consumes and mood == "raises" else mood

    @rule(prefer=st.sampled_from(sorted(TRIED)), strict=st.booleans())
    def set_policy(self, prefer: str, strict: bool) -> None:
        self.policy = SelectionPolicy(prefer=prefer, strict=strict)
        self.manager.set_policy(self.policy)
        self.demoted.clear()

    @rule(op=st.sampled_from(["rms_norm", "silu_and_mul", None]))
    def clear(self, op: str | None) -> None:
        self.manager.clear_failed_impls(op)
        if op != "silu_and_mul":
            self.demoted.clear()

    @rule(
        form=st.sampled_from(["call", "resolve", "call_as_method", "bind", "granted"]),
        fused=st.booleans(),
        mistaken=st.booleans(),
        block=st.none() | st.sampled_from(sorted(TRIED)),
        strict=st.booleans(),
    )
    def call(self, form: str, fused: bool, mistaken: bool, block: str | None, strict: bool) -> None:
        x = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2)
        if mistaken:
            x = x.double()  # a dtype in which models are not served
        residual = x + 10 if fused else None
        inputs = (x.clone(), None if residual is None else residual.clone())
        self.errors.clear()
        self.ran.clear()
        if block is not None:
            self.override = SelectionPolicy(prefer=block, strict=strict)
        before = copy.copy(self.demoted)
        granted = fused and form == "granted"  # otherwise it overwrites copies
        what, who = self.predict(mistaken, granted)
        try:
            if self.override is not None:
                with policy_context(self.override):
                    result: Any = self.call_in(form, x, residual)
            else:
                result = self.call_in(form, x, residual)
        except Exception as error:
            result = error
        finally:
            self.override = None

        if mistaken:
            may_raise = what in ("mistake", "sticky", "nothing left", "all failed")
            assert may_raise or not isinstance(result, Exception)
            assert what == "sticky" or self.demoted == before, "a caller's mistake never demotes"
        if granted:
            new = {impl_id for _, impl_id in self.manager.demotions} - before
            assert not any(IMPLS[impl_id][1] for impl_id in new), "one that consumes"
        self.check(result, what, who, inputs)
        if form != "granted":
            assert torch.equal(x, inputs[0]), "the caller's x was written to"
            assert residual is None or torch.equal(residual, inputs[1])
        if strict and block is not None:
            assert len(self.ran) <= 1, "strict tried a second"

    def call_in(self, form: str, x: torch.Tensor, residual: torch.Tensor | None) -> Any:
        weight, epsilon = Layer.weight, Layer.variance_epsilon
        if form == "call":
            return self.manager.call("rms_norm", x, residual, weight, epsilon)
        if form == "resolve":
            return self.manager.resolve("rms_norm")(x, residual, weight, epsilon=epsilon)
        if form == "call_as_method":
            return self.manager.call_as_method("rms_norm", Layer(), x, residual)
        grants = frozenset({"x", "residual"}) if form == "granted" else frozenset()
        return self.manager.bind("rms_norm", Layer(), grants)(x, residual)

    def check(self, result: Any, what: str, who: Any, inputs: tuple[Any, Any]) -> None:
        if what == "result":
            assert not isinstance(result, Exception), result
            factor = IMPLS[who][0]
            x, residual = inputs
            got = result if residual is not None else (result, None)
            assert torch.equal(got[0], x * factor), "computed from half-written inputs"
            if residual is not None:
                assert torch.equal(got[1], residual * factor)
        elif what in ("sticky", "raised"):
            assert result is self.errors[-1]
            assert str(result).startswith(who)
        elif what == "mistake":
            assert type(result) is CallError
            assert result.argument == "x"
        elif what == "all failed":
            assert type(result) is AllFailedError
            assert [impl_id for impl_id, _ in result.causes] == who
            for impl_id, cause in result.causes:
                message = cause if isinstance(cause, str) else str(cause)
                assert message in str(result) and impl_id in str(result)
        else:
            assert type(result) is NoImplementationError
            rejected = dict(result.rejected)
            assert set(who) <= set(rejected)
            for impl_id in who:
                assert f"{impl_id} broke" in rejected[impl_id]

    @invariant()
    def demotions_and_counts_are_the_models(self) -> None:
        if not hasattr(self, "manager"):
            return
        assert {impl_id for _, impl_id in self.manager.demotions} == self.demoted
        assert dict(self.manager.fallbacks) == self.fallbacks


TestMachine = Machine.TestCase
TestMachine.settings = settings(stateful_step_count=25)
