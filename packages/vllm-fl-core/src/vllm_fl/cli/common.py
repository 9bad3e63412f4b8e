"""What verbs of every distribution have in common: answers, errors, options, long runs.

A verb that another distribution brings imports these names from here, and nothing else of the
command's. `vllm_fl.cli._verbs` says what a verb is.
"""

from __future__ import annotations

from ._options import check_known, device_of, positive_seconds
from ._progress import doing
from ._report import ReportFile
from ._show import SCHEMA, UsageError, print_json, print_table, say
from ._verbs import VerbError
from ._watch import TookTooLong, Watch

__all__ = [
    "SCHEMA",
    "ReportFile",
    "TookTooLong",
    "UsageError",
    "VerbError",
    "Watch",
    "check_known",
    "device_of",
    "doing",
    "positive_seconds",
    "print_json",
    "print_table",
    "say",
]
