"""A finding of `vllm-fl doctor`: a module of its own, since no other process needs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that `vllm-fl doctor` reports.

    Args:
        check: the check that found it, for programs (`vllm-plugins`).
        what: what is wrong, one sentence.
        why: what follows from it, or what caused it.
        todo: what ends it: a command, which a shell takes as it stands.
    """

    check: str
    what: str
    why: str
    todo: str
