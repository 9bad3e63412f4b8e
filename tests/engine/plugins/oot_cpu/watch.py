"""Which forward of our layers vLLM binds, printed as `oot_cpu: <class> binds <forward>`."""

from __future__ import annotations

from typing import Any

FORWARDS = ("forward_native", "forward_cpu", "forward_cuda", "forward_oot")


class Watched:
    """A descriptor in front of another one."""

    def __init__(self, inner: Any, name: str) -> None:
        self.inner = inner
        self.name = name

    def __get__(self, layer: object, owner: type) -> Any:
        if layer is not None:
            print(f"oot_cpu: {owner.__name__} binds {self.name}", flush=True)
        return self.inner.__get__(layer, owner)


def watch_layers() -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    for layer in op_registry_oot.values():
        for name in FORWARDS:
            inner = layer.__dict__.get(name)
            if inner is not None and not isinstance(inner, Watched):
                setattr(layer, name, Watched(inner, name))
