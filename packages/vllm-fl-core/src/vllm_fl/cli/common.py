"""What verbs of every distribution have in common: answers, errors, options, long runs.

A verb that another distribution brings imports these names from here, and nothing else of the
command's. `vllm_fl.cli._verbs` says what a verb is.
"""

from __future__ import annotations

from ._options import ReportFile, check_known, device_of, positive_seconds
from ._progress import TookTooLong, Watch, doing
from ._show import SCHEMA, UsageError, answer, print_json, print_table, say
from ._verbs import VerbError

__all__ = [
    "SCHEMA",
    "ReportFile",
    "TookTooLong",
    "UsageError",
    "VerbError",
    "Watch",
    "answer",
    "check_known",
    "device_of",
    "doing",
    "positive_seconds",
    "print_json",
    "print_table",
    "say",
]
