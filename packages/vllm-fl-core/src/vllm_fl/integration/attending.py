"""A dummy run with attention, uncompiled: kernels that compile when they are called do so now."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm import forward_context
from vllm.config.vllm import set_current_vllm_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def attend(runner: Any, vllm_config: VllmConfig, *, is_eager: bool) -> None:
    """Run the loaded model once with its attention, uncompiled, on one token of vLLM's own.

    vLLM does that before it captures whole graphs, and else not: a backend that compiles kernels
    when it is called first would do so for a request. The KV cache must be there. The newer runner
    takes steps with attention before it captures anything.

    Args:
        runner: vLLM's model runner, the newer or the older one.
        vllm_config: the engine's.
        is_eager: whether nothing is compiled or captured.
    """
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


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside the block, vLLM's models run their own code instead of what was made of it."""
    make = forward_context.create_forward_context

    def uncompiled(*args: Any, **named: Any) -> Any:
        context = make(*args, **named)
        context.skip_compiled = True
        return context

    forward_context.create_forward_context = uncompiled
    try:
        yield
    finally:
        forward_context.create_forward_context = make
