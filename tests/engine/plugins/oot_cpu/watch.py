"""Which forward of our layers vLLM runs, printed as `oot_cpu: <class> runs <forward>`."""

from __future__ import annotations

from typing import Any

FORWARDS = ("forward_native", "forward_cpu", "forward_cuda", "forward_oot")


_said: set[str] = set()


class Watched:
    """A descriptor in front of another one."""

    def __init__(self, inner: Any, name: str) -> None:
        self.inner = inner
        self.name = name

    def __get__(self, layer: object, owner: type) -> Any:
        bound = self.inner.__get__(layer, owner)
        if layer is None:
            return bound
        said = f"oot_cpu: {owner.__name__} runs {self.name}"

        def run(*args: Any, **kwargs: Any) -> Any:
            if said not in _said:
                _said.add(said)
                print(said, flush=True)
            return bound(*args, **kwargs)

        return run


def watch_layers() -> None:
    from vllm.model_executor.custom_op import op_registry_oot

    for layer in op_registry_oot.values():
        for name in FORWARDS:
            inner = layer.__dict__.get(name)
            if inner is not None and not isinstance(inner, Watched):
                setattr(layer, name, Watched(inner, name))
