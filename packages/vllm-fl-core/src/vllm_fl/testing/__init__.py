"""The conformance kit, by the name that backends import: `vllm_fl_tools.testing` is all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from vllm_fl_tools import testing as _kit
except ModuleNotFoundError as error:
    if error.name != "vllm_fl_tools":
        raise
    raise ModuleNotFoundError(
        f"{__name__} comes with vllm-fl-tools, which is not installed: "
        "pip install 'vllm-fl-core[testing]'",
        name=error.name,
    ) from error

if TYPE_CHECKING:
    from vllm_fl_tools.testing import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(_kit, name)


def __dir__() -> list[str]:
    return dir(_kit)
