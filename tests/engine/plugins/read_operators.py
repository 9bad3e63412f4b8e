"""Operators that vLLM's last pass over a compiled graph reads and that its CPU build lacks."""

from __future__ import annotations

import torch

from vllm_fl import WorkerContext, WorkerReport, hookimpl
from vllm_fl.integration.compat import vllm_version
from vllm_fl.integration.patchers import missing_operators

library = torch.library.Library("_C", "FRAGMENT")


@hookimpl
def worker_start(context: WorkerContext) -> WorkerReport:
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    for name, (schema, is_read) in missing_operators._table(vllm_version()).items():
        if is_read and name not in known:
            library.define(schema.partition("::")[2])
    return WorkerReport(())
