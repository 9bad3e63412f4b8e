"""What is seen today: what the corpus asks for, without what is not done yet."""

from __future__ import annotations

from .corpus import Wrong
from .not_yet import KIT, START

__all__ = ["check_of", "is_named_at_start"]


def is_named_at_start(wrong: Wrong) -> bool:
    """Whether verification at start takes the kernel out by name."""
    return wrong.start and wrong.name not in START


def check_of(wrong: Wrong) -> str:
    """The check of the kit that fails, or empty."""
    return "" if wrong.name in KIT else wrong.kit
