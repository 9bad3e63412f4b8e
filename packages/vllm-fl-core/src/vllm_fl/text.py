"""Foreign text: what plugins, libraries and the environment say, before anybody reads it.

A plugin's name, a reason or an error's message may hold anything: escape sequences that rewrite a
terminal, line breaks that forge a line of the log, the password in a proxy's address.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator

HIDDEN = "<redacted>"

INDENTED = "\n    "
"""What a line break becomes in a log, where a foreign line must not begin where ours begin."""

SHORTEST = 6
"""Characters. A shorter value may stand in any text, and taking it out would say what it is."""

LONGEST = 20_000
"""Characters of foreign text that are shown: an error may quote a whole file."""

_SECRET = re.compile(
    r"(?:^|[_.\-])(?:pats?|pwd|pass|auth|bearer|cookies?|keys?|dsn)(?:$|[_.\-])"
    r"|(?:tokens?|secrets?|passw(?:or)?d|passphrases?|credentials?|api[_\-]?keys?)(?:$|[_.\-\d])",
    re.IGNORECASE,
)
"""Names of secrets. A word that is part of others stands alone; `password` ends PGPASSWORD too."""

_USERINFO = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")
_ASSIGNED = re.compile(
    r"((?:\w(?<!\bper)[_\-]token|[?&]token|secret|passw(?:or)?d|passphrase|api[_\-]?key|access[_\-]?key)"
    r"[\"']?\s*[=:]\s*[\"']?)(?!\d+\b)([^\s\"',;&)}\]<]{4,})",
    re.IGNORECASE,
)
"""`password=…`. The word token alone is ours, the entry of an order; `per_token`, a contract's."""
_SHAPES = re.compile(
    r"\b(?:hf_\w{20,}|gh[oprsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    r"|(?<=Bearer )[\w.~+/=-]{8,}"
)
"""Tokens that are known by their form: Hugging Face's, GitHub's, GitLab's, OpenAI's and so on."""


def clean(text: str, line_break: str = " ") -> str:
    r"""`text` without secrets, and with nothing in it that acts on a terminal or a log.

    Args:
        text: anything.
        line_break: what a line break becomes, a blank or `INDENTED`.

    Returns:
        Printable characters and `line_break`. Others are shown escaped (`\x1b`).
    """
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}… ({len(text) - LONGEST} characters more)"
    text = scrub(text)
    if text.isprintable():
        return text
    lines = re.split(r"[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]+", text.strip("\r\n"))
    return line_break.join("".join(map(_shown, line)) for line in lines)


def _shown(character: str) -> str:
    if character.isprintable():
        return character
    if character == "\t" or unicodedata.category(character) == "Zs":
        return " "
    return ascii(character)[1:-1]


def quote(error: BaseException) -> str:
    """An exception as `Type: message`, cleaned: also one that cannot be printed."""
    return clean(spelt(error))


def spelt(error: BaseException) -> str:
    """As `quote`, not cleaned: for calls, which cleaning would slow down. Logs clean it."""
    name = type(error).__name__
    try:
        message = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as second:  # its author's mistake, which must not hide the first one
        return f"{name} (it cannot be printed: its __str__ raises {type(second).__name__})"
    return f"{name}: {message}" if message else name


def is_secret(name: str) -> bool:
    """Whether a variable or key of this name holds a secret: `HF_TOKEN`, `PGPASSWORD`."""
    return name != "PWD" and _SECRET.search(name) is not None


def scrub(text: str) -> str:
    """`text` without the environment's secrets, a URL's user part, and what looks like a token."""
    for value in sorted(set(_secrets()), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _USERINFO.sub(HIDDEN, text)
    text = _ASSIGNED.sub(lambda found: found[1] + HIDDEN, text)
    return _SHAPES.sub(HIDDEN, text)


def _secrets() -> Iterator[str]:
    """The values in the environment that are secret: whole ones, and the passwords in URLs."""
    for name, value in os.environ.items():
        if is_secret(name) and _tells(name, value):
            yield value
        _, scheme, rest = value.partition("://")
        if scheme and "@" in rest:
            user = rest.rpartition("@")[0]
            password = user.partition(":")[2]
            yield from (part for part in (user, password) if len(part) >= SHORTEST)


def _tells(name: str, value: str) -> bool:
    """Whether this value is one to hide: not `1`, nor a path to where the secret lies."""
    return len(value) >= SHORTEST and not (value.startswith("/") and os.path.exists(value))


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name that `word` is most likely a slip of, in whatever case; None without one.

    Args:
        word: what somebody wrote.
        known: the names that there are.
        cutoff: how alike the two must be, from 0 to 1. Two letters that changed places are near
            enough always: in a short name they are half of it.
    """
    import difflib  # only for a word that is wrong

    folded = word.casefold()
    by_fold = {name.casefold(): name for name in sorted(known, reverse=True)}
    found = difflib.get_close_matches(folded, by_fold, n=1, cutoff=cutoff)
    found += [
        swapped
        for at in range(len(folded) - 1)
        if (swapped := folded[:at] + folded[at + 1] + folded[at] + folded[at + 2 :]) in by_fold
    ]
    return by_fold[found[0]] if found else None


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean 'rms_norm'?`, or empty without a near name. Arguments as for `nearest`."""
    found = nearest(word, known, cutoff)
    return f" Did you mean {found!r}?" if found else ""


def kind_of(value: object) -> str:
    """A value of a file, for an error that expected another one."""
    if value is None:
        return "nothing (leave the key out, or write [] for an empty list)"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, int | float):
        return f"{str(value).lower()} ({type(value).__name__}; in quotes it is text)"
    names = {list: "a list", dict: "a mapping"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), str(type(value)))
