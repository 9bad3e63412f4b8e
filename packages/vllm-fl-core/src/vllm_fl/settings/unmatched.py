"""Tokens of the user's orders that match nothing that can run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from ..plugins.types import Impl
from ..text import closest
from .policy import DEFAULT, GROUP, KINDS, MODES, UNTOUCHED, OpOrder, Token
from .schema import Setting, Settings
from .values import ORDER_PREFIX, PLATFORMS

Impls = Collection[Impl]


def unmatched(
    settings: Settings,
    impls_by_op: Mapping[str, Impls],
    has_failed: Callable[[str, str], bool] = lambda name, op: False,
) -> Iterator[tuple[str, str]]:
    """(op, a sentence) for each of the user's orders with tokens that match nothing that can run.

    An implementation cannot run if a vendor filter excludes it or it is not available. A token of
    another platform is only reported if nothing of the order can run, since one file may serve
    several machines.

    Args:
        settings: the settings.
        impls_by_op: what is installed.
        has_failed: whether the plugin that may have an id or vendor, for an op, has failed. Its
            error is reported by the call of the op.
    """
    for key, setting in settings.items():
        op, order = key.removeprefix(ORDER_PREFIX), setting.value
        if isinstance(order, OpOrder) and order.pinned and not op.startswith(GROUP):
            ops: Collection[str] = impls_by_op if op == DEFAULT else (op,)
            if order.group:
                listed = settings.policy.per_op_order
                ops = [each for each in listed if listed[each].group == order.group]
                op = f"{GROUP}{order.group}"
            impls = [impl for each in ops for impl in impls_by_op.get(each, ())]
            if said := _said(op, order, setting, settings, impls, has_failed):
                yield op, said


def meant(token: Token, impls: Impls) -> str:
    """` Did you mean 'impl:vendor.acme'?`, or empty if no installed one is near."""
    known = {
        *(f"impl:{impl.impl_id}" for impl in impls),
        *(f"vendor:{impl.vendor}" for impl in impls if impl.vendor),
        *(impl.kind.value for impl in impls),
    }
    return closest(str(token), known, 0.7)


def _said(
    op: str,
    order: OpOrder,
    setting: Setting,
    settings: Settings,
    impls: Impls,
    has_failed: Callable[[str, str], bool],
) -> str:
    problems: dict[Token, str] = {}
    failed = False
    for token in order.every:
        matched = [impl for impl in impls if token.matches(impl)]
        whys = [_obstacle(impl, settings) for impl in matched]
        if token.kind in UNTOUCHED or any(why is None for why in whys):
            continue
        if matched:
            each = (f"{impl.impl_id} ({why})" for impl, why in zip(matched, whys, strict=True))
            problems[token] = f"{str(token)!r} cannot run: {'; '.join(dict.fromkeys(each))}."
        elif token.name and has_failed(token.name, op):
            failed = True
        else:
            slip = meant(token, impls)
            problems[token] = f"no installed implementation of {op} matches {str(token)!r}.{slip}"
    rows = [tokens for mode in MODES for _, tokens in order.rows(mode)]
    is_lost = bool(impls) and not failed and any(problems.keys() >= {*row} for row in rows)
    if not is_lost:
        problems = {t: why for t, why in problems.items() if not _may_be_elsewhere(t)}
    if not problems:
        return ""
    lost = ""
    if is_lost:
        engine = "no engine starts" if settings.policy.strict else "an engine runs vLLM's own code"
        lost = (
            f" Nothing that is listed can run, so that {op} has lost every implementation: a call "
            f"from a script fails, and {engine}."
        )
    return f"{setting.origin}: {ORDER_PREFIX}{op}: {' '.join(problems.values())}{lost}"


def _obstacle(impl: Impl, settings: Settings) -> str | None:
    """Why an installed implementation cannot run here, or None."""
    why = settings.policy.refuses(impl)
    if why is None and (verdict := impl.availability()) is not True:
        why = f"not available: {verdict}"
    return why


def _may_be_elsewhere(token: Token) -> bool:
    """Whether it is a kind or a platform's vendor, which other machines may have."""
    return token.kind in KINDS and (token.name is None or token.name in PLATFORMS)
