"""Cleaning of text from plugins, libraries and the environment.

The text may contain escape sequences that rewrite a terminal, line breaks that forge a line of the
log, or passwords.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache

REDACTED = "<redacted>"

INDENTED = "\n    "
"""The replacement of a line break in a log. Foreign lines must not look like log lines."""

SHORTEST = 6
"""Minimum length of a secret. A shorter value occurs in any text, so hiding it would reveal it."""

LONGEST = 20_000
"""Maximum length of foreign text to show, because an error may quote a whole file."""

_SECRET = re.compile(
    r"(?:^|[_.\-])(?:pats?|pwd|pass|auth|bearer|cookies?|keys?|dsn)(?:$|[_.\-])"
    r"|(?:tokens?|secrets?|passw(?:or)?d|passphrases?|credentials?|api[_\-]?keys?)(?:$|[_.\-\d])",
    re.IGNORECASE,
)
"""Matches names of secrets. Words that occur in other words, such as `key`, must be separate.
`password` also matches PGPASSWORD."""

_USERINFO = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")
_ASSIGNED = re.compile(
    r"((?:\w(?<!\bper)[_\-]token|[?&]token|secret|passw(?:or)?d|passphrase|api[_\-]?key|access[_\-]?key)"
    r"[\"']?\s*[=:]\s*[\"']?)(?!\d+\b)([^\s\"',;&)}\]<]{4,})",
    re.IGNORECASE,
)
"""Matches `password=…`. It excludes the word `token` without a prefix, which occurs in orders, and
`per_token`, which occurs in contracts."""
_SHAPES = re.compile(
    r"\b(?:hf_\w{20,}|gh[oprsu]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*)"
    r"|(?<=Bearer )[\w.~+/=-]{8,}"
)
"""Matches tokens with a known form, such as tokens of Hugging Face, GitHub, GitLab and OpenAI."""


def clean(text: str, line_break: str = " ") -> str:
    r"""Return `text` without secrets and without control characters.

    Args:
        text: the text. It is shortened to `LONGEST` characters.
        line_break: the replacement of line breaks, a blank or `INDENTED`.

    Returns:
        Printable characters and `line_break`. Other characters are escaped (`\x1b`).
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
    """Return an exception as `Type: message`, cleaned, even if its `__str__` raises."""
    return clean(spelt(error))


def spelt(error: BaseException) -> str:
    """Return an exception as `Type: message`. It is not cleaned, because cleaning is slow and
    loggers do it."""
    name = type(error).__name__
    try:
        message = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as second:  # must not hide the first error
        return f"{name} (it cannot be printed: its __str__ raises {type(second).__name__})"
    return f"{name}: {message}" if message else name


@lru_cache(1024)  # each text is searched for the values of all variables
def is_secret(name: str) -> bool:
    return name != "PWD" and _SECRET.search(name) is not None


def scrub(text: str) -> str:
    """Return `text` without secrets of the environment, user parts of URLs, and likely tokens."""
    for value in sorted(set(_secrets()), key=len, reverse=True):
        text = text.replace(value, REDACTED)
    text = _USERINFO.sub(REDACTED, text)
    text = _ASSIGNED.sub(lambda found: found[1] + REDACTED, text)
    return _SHAPES.sub(REDACTED, text)


def _secrets() -> Iterator[str]:
    """Yield secrets in the environment: values of variables with secret names, and user parts of
    URLs."""
    for name, value in os.environ.items():
        if is_secret(name) and _tells(value):
            yield value
        _, scheme, rest = value.partition("://")
        if scheme and "@" in rest:
            user = rest.rpartition("@")[0]
            password = user.partition(":")[2]
            yield from (part for part in (user, password) if len(part) >= SHORTEST)


def _tells(value: str) -> bool:
    """Whether to hide a value. A short value, such as `1`, or the path of an existing file is not
    hidden."""
    return len(value) >= SHORTEST and not (value.startswith("/") and os.path.exists(value))


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to `word`, ignoring case, or None. `cutoff` is the
    least similarity, from 0 to 1. A name with the same letters always matches, because two swapped
    letters may be half of a short name."""
    import difflib  # rarely needed

    by_fold = {name.casefold(): name for name in sorted(known, reverse=True)}
    found = difflib.get_close_matches(word.casefold(), by_fold, n=1, cutoff=cutoff)
    found += [name for name in by_fold if sorted(name) == sorted(word.casefold())]
    return by_fold[found[0]] if found else None


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    found = nearest(word, known, cutoff)
    return f" Did you mean {found!r}?" if found else ""


def kind_of(value: object) -> str:
    """Describe a value of a settings file, for an error."""
    if value is None:
        return "nothing (omit the key, or write [] for an empty list)"
    if isinstance(value, str):
        return f"the text {value!r}"
    if isinstance(value, int | float):
        return f"{str(value).lower()} ({type(value).__name__}; in quotes it is text)"
    names = {list: "a list", dict: "a mapping"}
    return next((name for kind, name in names.items() if isinstance(value, kind)), str(type(value)))
