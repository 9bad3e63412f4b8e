"""The backend: reports whether the device is available; functions of `impl` compute."""

from __future__ import annotations

from vllm_fl.dispatch.backends.base import Backend


class IluvatarBackend(Backend):
    """Emulated Iluvatar: available if torch is."""

    @property
    def name(self) -> str:
        return "iluvatar"

    @property
    def vendor(self) -> str | None:
        return "iluvatar"

    def is_available(self) -> bool:
        from importlib.util import find_spec

        return find_spec("torch") is not None
