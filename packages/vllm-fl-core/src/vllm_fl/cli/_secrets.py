"""Keeping secrets out of what is printed."""

from __future__ import annotations

import os
import re

__all__ = ["is_secret", "scrub"]

_SECRET = re.compile(
    r"(?:^|[_.\-])(?:tokens?|secrets?|passw(?:or)?d|passphrase|credentials?|api[_\-]?keys?|"
    r"access[_\-]?keys?|private[_\-]?keys?)(?:$|[_.\-])",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)[^/\s@]+(?=@)")

SHORTEST = 6
"""Characters. A shorter value may stand in any text, and taking it out would say what it is."""

HIDDEN = "<redacted>"


def is_secret(name: str) -> bool:
    """Whether a variable or key of this name holds a secret: `HF_TOKEN`, `aws.secret-key`."""
    return _SECRET.search(name) is not None


def scrub(text: str) -> str:
    """`text` without the values of the environment's secrets, and without a URL's user part.

    An error that a plugin raised may quote anything.
    """
    values = {v for k, v in os.environ.items() if is_secret(k) and len(v) >= SHORTEST}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _USERINFO.sub(HIDDEN, text)
