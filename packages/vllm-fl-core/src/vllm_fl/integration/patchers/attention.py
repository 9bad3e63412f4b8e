"""Choose the attention backend: for the model in the plan, and again for each new layer.

`attend` then runs it once, because it may compile kernels at its first call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ...contracts.targets import AttentionTarget
from ...dispatch.context import swapped
from ...dispatch.resolver import STOCK
from ...engine.facts import EngineFacts
from ...engine.plan import Plan
from ...errors import NO_FALLBACK, AllFailedError
from ...logs import get_logger
from ...plugins.types import ATTENTION, AttentionImpl, AttentionRequest
from ..patcher import Patcher, WhyNot
from . import classes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ..engines import Engine

FIELDS = ("head_size", "dtype", "kv_cache_dtype", "block_size", "use_mla", "has_sink", "use_sparse")
"""The fields of attention requests that every release has. Other fields are extras."""

METHODS = ("get_name", "get_impl_cls", "get_builder_cls")

log = get_logger("engine")


def choose(
    plan: Plan, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
) -> str | None:
    """Return the class path of the attention backend for one layer; None if vLLM chooses it. A
    backend that the user has set in vLLM (`selected_backend`) has priority. Raises AllFailedError
    in strict mode if the planned backend does not support this layer."""
    entry = plan.entries[ATTENTION]
    backends = entry.classes(AttentionImpl)
    if selected_backend is not None:
        if backends:
            name = getattr(selected_backend, "name", selected_backend)
            text = "Op '%s': a layer uses %s, which is set in vLLM, instead of '%s'"
            log.info(text, ATTENTION, name, entry.label)
        return None
    fields = attn_selector_config._asdict()
    known = {name: fields.pop(name) for name in FIELDS if name in fields}
    request = AttentionRequest(**known, num_heads=num_heads, extras=MappingProxyType(fields))
    causes: list[tuple[str, BaseException | str]] = []
    taken, path = "stock.vllm", None
    for impl in backends:
        reason = classes.class_refusal(impl, ATTENTION, request)
        if reason is None:
            path, _, reason = classes.class_of(impl, ATTENTION, request, _problem)
            if not reason:
                taken = impl.impl_id
                break
        path = None
        text = f"Implementation '{impl.impl_id}' does not support a layer of op '{ATTENTION}'"
        log.warning("%s: %s", text, reason)
        causes.append((impl.impl_id, reason))
        if plan.strict:
            message = f"{text}: {reason}. {NO_FALLBACK}"
            raise AllFailedError(message, op=ATTENTION, causes=causes)
    if causes:  # once per distinct request, because vLLM caches the answer
        plan.fallbacks[ATTENTION, taken] += 1
        log.info("Op '%s' fallback to '%s'", ATTENTION, taken)
    return path


def _problem(path: str, cls: Any) -> str:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if lacks := [method for method in METHODS if not callable(getattr(cls, method, None))]:
        return f"{path} is not an AttentionBackend of vLLM: it has no {', '.join(lacks)}"
    name = cls.get_name()
    if name in AttentionBackendEnum.__members__:
        return ""
    return (
        f"{path}.get_name() is {name!r}, which is not a key of vLLM's AttentionBackendEnum: keep "
        "the parent's name, or return 'CUSTOM'"
    )


class Attention(Patcher):
    kind = AttentionTarget

    def request(self, vllm_config: VllmConfig, /, *_: Any, compiled: bool) -> dict[str, Any]:
        """Return the attention request of the model, or None if the configuration is incomplete.
        Sinks and differences between layers are known only when the layers are built."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        parallel, is_hybrid = vllm_config.parallel_config, bool(getattr(model, "is_hybrid", False))
        try:
            keys = int(model.get_num_kv_heads(parallel))
            request = AttentionRequest(
                head_size=int(model.get_head_size()),
                dtype=model.dtype,
                kv_cache_dtype=cache.cache_dtype,
                block_size=(
                    cache.block_size if getattr(cache, "user_specified_block_size", False) else None
                ),
                use_mla=bool(model.use_mla),
                use_sparse=hasattr(model.hf_text_config, "index_topk"),  # DeepSeek V3.2
                num_heads=int(model.get_num_attention_heads(parallel)),
                extras=MappingProxyType({"is_hybrid": is_hybrid, "num_kv_heads": keys}),
            )
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            log.debug("cannot determine the model's attention request: %s", error)
            return {"attention": None}
        return {"attention": request}

    def why_not(self, facts: EngineFacts) -> WhyNot:
        """Return the user's choice of a backend, and why installed backends cannot run the model.
        Only backends before `stock` in the order are called, because vLLM's backend supports every
        model, and a `supports` may import a kernel library, which takes seconds."""
        backend = facts.attention_backend
        notes = {} if backend is None else {ATTENTION: f"attention_config.backend is {backend}"}
        order = facts.settings.policy.order(ATTENTION, facts.mode, engine=True)
        before = [*takewhile(lambda selector: selector.kind != STOCK.selector, order)]
        refused = classes.class_refusals(
            ATTENTION,
            facts.attention,
            "this model",
            among=lambda impl: any(selector.matches(impl) for selector in before),
        )
        return WhyNot(notes, refused)

    def faults(self, plan: Plan, facts: EngineFacts) -> dict[tuple[str, str], str]:
        request = facts.attention
        if request is None:
            return {}
        return {
            (ATTENTION, impl.impl_id): problem
            for impl in plan.entries[ATTENTION].classes(AttentionImpl)[:1]
            if (problem := classes.class_of(impl, ATTENTION, request, _problem)[2])
        }

    @contextmanager
    def building(self, engine: Engine) -> Iterator[None]:
        """Clear vLLM's cache of attention backends, because its key contains the request but not
        the engine."""
        from vllm.v1.attention import selector

        cached = getattr(selector, "_cached_get_attn_backend", None)
        if cached is not None:
            cached.cache_clear()
        yield


def attend(runner: Any, vllm_config: VllmConfig, *, is_eager: bool) -> None:
    """Run the loaded model once on a dummy token, uncompiled and with attention.

    vLLM does this only before it captures full graphs. Otherwise the first request would wait for a
    backend that compiles its kernels at the first call. The KV cache must be allocated. The newer
    model runner runs attention before it captures any graph. With that runner, this function
    therefore runs the model only if `is_eager` is set.

    Args:
        is_eager: whether nothing is compiled or captured.
    """
    from vllm.config.vllm import set_current_vllm_config

    options = {"skip_eplb": True, "skip_attn": False}
    if "force_attention" in inspect.signature(runner._dummy_run).parameters:
        options = {"skip_eplb": True, "is_profile": True, "force_attention": True}
    elif not is_eager:
        return
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(set_current_vllm_config(vllm_config))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(uncompiled())
        runner._dummy_run(1, **options)


def uncompiled() -> AbstractContextManager[None]:
    from vllm import forward_context

    make = forward_context.create_forward_context

    def uncompiled(*args: Any, **named: Any) -> Any:
        context = make(*args, **named)
        context.skip_compiled = True
        return context

    return swapped(forward_context, "create_forward_context", uncompiled)
