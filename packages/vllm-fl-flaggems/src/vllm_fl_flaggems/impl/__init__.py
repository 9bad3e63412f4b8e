"""The operators on FlagGems's Triton kernels, one module per family."""

from __future__ import annotations

from vllm_fl import BackendImplKind

__all__ = ["DEFAULT"]

DEFAULT = ("default.flagos", BackendImplKind.DEFAULT)
"""Identity and kind of every implementation here, attention included."""
