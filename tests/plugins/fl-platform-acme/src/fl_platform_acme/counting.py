"""Calls per function in this process."""

from __future__ import annotations

from collections import Counter

CALLS: Counter[str] = Counter()
