"""Our entry in `additional_config`: what an engine's configuration carries to its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import SettingsError
from ..settings.loading import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "vllm_fl"
"""Our entry in vLLM's `additional_config`, which vLLM hashes into its compile-cache key."""


class Carried(dict[str, Any]):
    """What is under `KEY`, on its way between the processes of an engine.

    A plain dictionary there was written by hand. It would set what nobody reads from there.

    Args:
        settings: the engine's; None where nobody has read them yet, or the plan is sealed. They
            travel along, and vLLM hashes the entries alone.
        entries: what is under `KEY`.
    """

    def __init__(self, settings: Settings | None = None, **entries: Any) -> None:
        super().__init__(entries)
        self.settings = settings

    def __reduce__(self) -> tuple[Any, ...]:
        return Carried, (self.settings,), None, None, iter(self.items())


def seal(vllm_config: VllmConfig, digest: str) -> Callable[[], None]:
    """Put the plan's digest where vLLM's compile-cache key is made from.

    It takes the place of the settings: those that do not change the plan must not miss the cache.

    Returns:
        What puts back what was there before, for a start that must plan once more.
    """
    extra = vllm_config.additional_config
    if not isinstance(extra, dict):
        return lambda: None
    before = extra.get(KEY)
    extra[KEY] = Carried(plan=digest)
    if enabled := (before or {}).get("enabled"):
        extra[KEY]["enabled"] = enabled

    def unseal() -> None:
        if before is None:
            del extra[KEY]
        else:
            extra[KEY] = before

    return unseal


def is_sealed(vllm_config: VllmConfig) -> bool:
    """Whether a worker of this engine has sealed its plan: nothing of it may change any more."""
    return "plan" in entry_of(vllm_config)


def turned_on(vllm_config: VllmConfig) -> set[str]:
    """The layers, by the names in `custom_ops`, that are on because of the plan alone."""
    return {name.removeprefix("+") for name in entry_of(vllm_config).get("enabled", ())}


def digest_of(vllm_config: VllmConfig) -> str:
    """The digest of the sealed plan; empty before it is sealed."""
    return str(entry_of(vllm_config).get("plan", ""))


def entry_of(vllm_config: VllmConfig) -> Carried:
    """What the configuration carries. An object of the user's own carries nothing: what is put into
    the answer is lost then."""
    extra = vllm_config.additional_config
    if not isinstance(extra, dict):
        return Carried()
    entry = extra.setdefault(KEY, Carried())
    if not isinstance(entry, Carried):
        raise SettingsError(
            f"additional_config: {KEY!r} is vllm-fl's own entry and cannot be set by hand; "
            "settings are made by VLLM_FL_CONFIG and VLLM_FL_* (`vllm-fl settings` shows them). "
            "Remove it.",
            key=KEY,
            origin="additional_config",
        )
    return entry
