"""Tokens of the user's lists that match nothing that can run, with why or what was likely meant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from ..plugins.types import Impl
from ..text import nearest
from .policy import DEFAULT, GROUP, KINDS, MODES, UNTOUCHED, OpOrder, Token
from .schema import Setting, Settings
from .values import ORDER_PREFIX, PLATFORMS

Impls = Collection[Impl]


def unmatched(
    settings: Settings,
    impls_by_op: Mapping[str, Impls],
    has_failed: Callable[[str, str], bool] = lambda name, op: False,
) -> Iterator[tuple[str, str]]:
    """(op, a sentence) for each of the user's lists that names what is not installed or cannot run.

    What is installed cannot run where a vendor filter keeps it out, or this machine lacks what it
    needs. Another platform's vendor beside tokens that match is no slip, since one file may serve
    several machines. Where nothing of a list can run the sentence says that the op has lost all.

    Args:
        settings: whose lists.
        impls_by_op: what is installed.
        has_failed: whether the plugin that would bring an id or vendor, for an op, has failed. Who
            asks for the op is told that as an error, so that nothing is said of it here.
    """
    for key, setting in settings.items():
        op, order = key.removeprefix(ORDER_PREFIX), setting.value
        if isinstance(order, OpOrder) and order.pinned and not op.startswith(GROUP):
            what, impls = _meets(op, order, settings, impls_by_op)
            barred = _barred(order, settings, impls)
            strict = settings.policy.strict
            said = _said(what, order, setting, impls, strict, has_failed, barred)
            if said:
                yield op, said


def _meets(
    op: str, order: OpOrder, settings: Settings, impls_by_op: Mapping[str, Impls]
) -> tuple[str, Impls]:
    """What a list is for, and what is installed for that: an op, a group of them, or every op.

    A token need not match something of each op of several.
    """
    ops: Collection[str] = (op,)
    if order.group:
        op, listed = f"{GROUP}{order.group}", settings.policy.per_op_order
        ops = [each for each in listed if listed[each].group == order.group]
    elif op == DEFAULT:
        ops = impls_by_op
    return op, [impl for each in ops for impl in impls_by_op.get(each, ())]


def meant(token: Token, impls: Impls) -> str:
    """` Did you mean 'impl:vendor.acme'?`, or nothing when no installed one is near."""
    known = {
        *(f"impl:{impl.impl_id}" for impl in impls),
        *(f"vendor:{impl.vendor}" for impl in impls if impl.vendor),
        *(impl.kind.value for impl in impls),
    }
    if token.name is None:
        return ""
    # A vendor taken for an id, an id for a vendor, a kind for either.
    bare = token.name.removeprefix("vendor.")
    by_fold = {text.casefold(): text for text in sorted(known)}
    for text in (f"{token.kind}:{bare}", f"vendor:{bare}", f"impl:{bare}", bare):
        if text.casefold() in by_fold:
            return f" Did you mean {by_fold[text.casefold()]!r}?"
    same = [text for text in known if text.startswith(f"{token.kind}:")]
    slip = nearest(str(token), same, 0.7) or nearest(str(token), known, 0.7)
    return f" Did you mean {slip!r}?" if slip else ""


def _barred(order: OpOrder, settings: Settings, impls: Impls) -> dict[Token, str]:
    """Token -> why nothing that it matches can run, of those that match something installed."""
    found = {}
    for token in dict.fromkeys(order.every):
        whys = []
        for impl in (impl for impl in impls if token.matches(impl)):
            why = settings.policy.refuses(impl)
            if why is None and (verdict := impl.availability()) is not True:
                why = f"not available: {verdict}"
            whys.append((impl.impl_id, why))
        if whys and all(why for _, why in whys):
            each = (f"{impl_id} ({why})" for impl_id, why in whys)
            found[token] = "; ".join(dict.fromkeys(each))
    return found


def _said(
    op: str,
    order: OpOrder,
    setting: Setting,
    impls: Impls,
    strict: bool,
    has_failed: Callable[[str, str], bool],
    barred: Mapping[Token, str],
) -> str:
    absent = {
        token: None
        for token in order.every
        if token.kind not in UNTOUCHED and not any(token.matches(impl) for impl in impls)
    }

    idle = {*absent, *barred}
    listed = [(mode, ceiling, row) for mode in MODES for ceiling, row in order.rows(mode)]
    lost = [(mode, n) for mode, n, tokens in listed if impls and idle.issuperset(tokens)]
    failed = {token for token in absent if token.name and has_failed(token.name, op)}
    if failed:  # the op ends with an error: no other code runs in its place
        lost = []
    named, cannot = (
        [t for t in tokens if t not in failed and (lost or not _may_be_elsewhere(t))]
        for tokens in (absent, barred)
    )
    parts = []
    if named:
        tokens = " ".join(f"{str(token)!r}.{meant(token, impls)}" for token in named)
        parts.append(f"no installed implementation of {op} matches {tokens}")
    parts += [f"{str(token)!r} cannot run: {barred[token]}." for token in cannot]
    if not parts:
        return ""
    told = f"{setting.origin}: {ORDER_PREFIX}{op}: {' '.join(parts)}"
    if not lost:
        return told
    where = ""
    if len(lost) < len(listed):
        mode, ceiling = lost[0]
        if len(order.rows(mode)) > 1:
            where = f" for calls of at most {ceiling} tokens" if ceiling else " for larger calls"
        if any((each, ceiling) not in lost for each, _, _ in listed):
            where += f" in {mode} mode"
    engine = "no engine starts (strict mode)" if strict else "an engine runs vLLM's own code"
    nothing = f"Nothing that is listed {'can run' if cannot else 'matches'}"
    return (
        f"{told} {nothing}, so that {op} has lost every implementation{where}: a call from a "
        f"script fails, and {engine}."
    )


def _may_be_elsewhere(token: Token) -> bool:
    """Whether its absence is no slip: a kind, or a platform's vendor, which others may have."""
    return token.kind in KINDS and (token.name is None or token.name in PLATFORMS)
