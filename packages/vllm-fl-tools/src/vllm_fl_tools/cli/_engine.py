"""Descriptions of the engines of this environment, for the verbs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from vllm_fl.dispatch import get_default_manager
from vllm_fl.dispatch.startup import read_settings
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import PlanEntry, make_plan
from vllm_fl.errors import VllmFLError
from vllm_fl.logs import silence
from vllm_fl.settings.policy import MODES, Mode
from vllm_fl.text import clean, quote

from ..operate.described import Described
from ._engine_args import WrongArguments, arguments_of
from ._other_plugins import attributed
from ._progress import doing
from ._show import UsageError

NOT_INSTALLED = "vLLM is not installed"


def takes_engine(parser: argparse.ArgumentParser) -> None:
    """Add the options of a verb about engines: their model and their mode."""
    takes_model(parser, "the model's folder; its weights are not read")
    parser.add_argument("--mode", choices=MODES, help="describe an engine in this mode")


def takes_model(parser: argparse.ArgumentParser, text: str, *, required: bool = False) -> None:
    """Make a verb accept a model, with this help, and arguments for vLLM, in its `more`."""
    parser.add_argument("--model", metavar="DIR", required=required, help=text)
    parser.set_defaults(takes_more=True)
    parser.allow_abbrev = False
    parser.epilog = (
        "Other arguments are passed to vLLM, as for `vllm serve`: --enforce-eager, --dtype bfloat16"
    )


def asked_of(arguments: argparse.Namespace) -> list[Described]:
    """Return the engines that a verb's `--mode`, `--model` and other arguments describe.

    The list is empty for a script. Without a model, it has one engine for each mode.

    Raises:
        UsageError, VllmFLError: like `check_words`, `engine_of` and `any_engines`.
    """
    check_words(arguments)
    mode, model = arguments.mode, arguments.model
    if mode == "script":
        return []
    if model is None:
        return any_engines([mode] if mode else MODES)
    given = {*map(option_of, arguments.more)}
    is_given = not given.isdisjoint(("--enforce-eager", "--no-enforce-eager"))
    eager = ["--enforce-eager"] * (mode == "eager" and not is_given)
    engine = engine_of(model, [*arguments.more, *eager])
    if mode not in (None, engine.facts.mode):
        raise UsageError(f"--mode {mode}: with these arguments the engine is {engine.facts.mode}")
    return [engine]


def option_of(word: str) -> str:
    """Return the name of an option without its value, with dashes instead of underscores."""
    return word.partition("=")[0].replace("_", "-")


def check_words(arguments: argparse.Namespace) -> None:
    """Raise UsageError if arguments of a verb are incompatible."""
    if arguments.mode == "script" and arguments.model is not None:
        raise UsageError("--script and --model exclude each other")
    if arguments.model is None and arguments.more:
        words = " ".join(arguments.more)
        raise UsageError(f"unrecognized arguments: {words} (vLLM's arguments need --model DIR)")


def engine_of(model: str, words: Sequence[str], *, offline: bool = False) -> Described:
    """Describe the engine that these arguments would start on this machine.

    Args:
        model: the model's folder, or another name that vLLM accepts.
        words: the other arguments of `vllm serve`.
        offline: whether `vllm.LLM` starts it, with a larger default for the largest batch.

    Raises:
        UsageError: vLLM is not installed, finds no device, or cannot serve this model.
        VllmFLError: the engine would not start.
    """
    if find_spec("vllm") is None:
        raise UsageError(f"--model {model}: {NOT_INSTALLED}")
    is_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if is_path and not os.path.exists(model):  # vLLM would look for it on a hub
        raise UsageError(f"--model {model}: not found")
    try:
        with _asking("reading the model as vLLM does"):
            from vllm.platforms import current_platform
            from vllm.usage.usage_lib import UsageContext

            if not current_platform.device_type:
                raise UsageError(
                    "vLLM finds no device that it supports here: run this on the machine that "
                    "will serve"
                )
            from ..operate.describing import describe_engine

            usage = UsageContext.LLM_CLASS if offline else UsageContext.OPENAI_API_SERVER
            return describe_engine(arguments_of(model, words).create_engine_config(usage))
    except VllmFLError:
        raise
    except WrongArguments as error:
        raise UsageError(f"vLLM rejects these arguments: {clean(str(error))}") from error
    except Exception as error:  # vLLM raises any exception for unsupported models
        raise UsageError(f"--model {model}: vLLM cannot serve it: {quote(error)}") from error


def any_engines(modes: Sequence[Mode] = MODES) -> list[Described]:
    """Describe the engines of any model, one for each mode.

    If vLLM is not installed or fails, only settings and plugins are considered.

    Raises:
        VllmFLError: an engine would not start.
    """
    unasked = NOT_INSTALLED
    if find_spec("vllm") is not None:
        try:
            with _asking("querying vLLM"):
                from ..operate.describing import describe_any

                return [describe_any(mode) for mode in modes]
        except VllmFLError:
            raise
        except Exception as error:  # vLLM and its plugins may be broken in any way
            unasked = f"vLLM failed: {quote(error)}"
    manager = get_default_manager()
    settings = read_settings(manager.registry)  # not cached: `plan --diff FILE` changes them
    every = (EngineFacts(settings, mode) for mode in modes)
    return [Described(facts, make_plan(manager, facts), unasked=unasked) for facts in every]


def plan_entry(engine: Described, op: str) -> PlanEntry | None:
    """Return an engine's plan for an op; None if the engine runs vLLM's code, or lacks the op."""
    found = engine.plan.entries.get(op)
    if found is not None or engine.aside or engine.has_model:
        return found
    # A communicator needs several ranks. The number of ranks is unknown without a model.
    facts = engine.facts
    rows = get_default_manager().rows(op, mode=facts.mode, engine=True, settings=facts.settings)
    return PlanEntry(op, rows)


@contextmanager
def _asking(what: str) -> Iterator[None]:
    """Show progress during the block, and log only errors of vLLM."""
    level = "VLLM_LOGGING_LEVEL"
    is_set = level in os.environ
    os.environ.setdefault(level, "ERROR")
    try:
        with doing(what), silence(ours=False), attributed():
            yield
    finally:
        if not is_set:
            os.environ.pop(level, None)
