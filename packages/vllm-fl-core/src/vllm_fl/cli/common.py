"""What verbs of every distribution have in common: answers, errors, options, long runs.

A verb that another distribution brings imports these names from here, and nothing else of the
command's. `vllm_fl.cli._verbs` says what a verb is.
"""

from __future__ import annotations

from ._engine import asked_of, engine_of, takes_engine, takes_vllms
from ._environment import distributions
from ._options import ReportFile, device_of
from ._progress import current, doing
from ._show import SCHEMA, UsageError, answer, answering, print_json, print_table, say
from ._verbs import VerbError
from .policy import text_of as settings_text

__all__ = [
    "SCHEMA",
    "ReportFile",
    "UsageError",
    "VerbError",
    "answer",
    "answering",
    "asked_of",
    "current",
    "device_of",
    "distributions",
    "doing",
    "engine_of",
    "print_json",
    "print_table",
    "say",
    "settings_text",
    "takes_engine",
    "takes_vllms",
]
