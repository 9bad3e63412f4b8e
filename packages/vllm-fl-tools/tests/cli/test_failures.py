"""Reading an engine's log: the exception, the stack, and the owners of its functions."""

from __future__ import annotations

from vllm_fl_tools.cli._failures import read_log

SITE = "/srv/somebody/lib/python3.11/site-packages"

RAISED = f"""
INFO 11-26 10:00:00 [core.py:1] starts
(EngineCore pid=7) ERROR 11-26 10:00:01 [core.py:9] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-26 10:00:01 [core.py:9] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-26 10:00:01 [core.py:9]   File "{SITE}/vllm/v1/core.py", line 9, in mul
(EngineCore pid=7) ERROR 11-26 10:00:01 [core.py:9]     return call()
(EngineCore pid=7) ERROR 11-26 10:00:01 [core.py:9]   File "{SITE}/acme/ops/mm.py", line 3, in mm
(EngineCore pid=7) ERROR 11-26 10:00:01 [core.py:9]     launch()
(EngineCore pid=7) ERROR 11-26 10:00:01 [core.py:9] RuntimeError: an illegal memory access
Traceback (most recent call last):
  File "{SITE}/vllm/entrypoints/llm.py", line 2, in __init__
    raise RuntimeError
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""

IN_ONE_PROCESS = """
WARNING 11-26 10:00:02 [base.py:9] Chat template warmup failed
WARNING 11-26 10:00:02 [base.py:9] Traceback (most recent call last):
WARNING 11-26 10:00:02 [base.py:9]   File "/x/base.py", line 3, in warmup
WARNING 11-26 10:00:02 [base.py:9] ValueError: no tokenizer
[rank0]: Traceback (most recent call last):
[rank0]:   File "/x/acme.py", line 3, in mm
[rank0]: RuntimeError: an illegal memory access
"""

ABORTED = f"""
(EngineCore pid=7) Fatal Python error: Aborted
(EngineCore pid=7)
(EngineCore pid=7) Thread 0x1 (most recent call first):
(EngineCore pid=7)   File "{SITE}/tqdm/_monitor.py", line 6 in run
(EngineCore pid=7)
(EngineCore pid=7) Current thread 0x2 (most recent call first):
(EngineCore pid=7)   File "{SITE}/acme/ops/sort.py", line 5 in _launch
(EngineCore pid=7)   File "{SITE}/acme/ops/sort.py", line 3 in sort_stable
(EngineCore pid=7)   File "{SITE}/torch/_tensor.py", line 2 in sort
(EngineCore pid=7)
(EngineCore pid=7) Extension modules: numpy
Fatal Python error: Aborted

Current thread 0x3 (most recent call first):
  File "{SITE}/vllm/v1/engine/core_client.py", line 3 in get_output
"""


def test_the_root_exception_is_reported_instead_of_the_parent_processs() -> None:
    assert read_log(RAISED) == ("RuntimeError: an illegal memory access", ["mm"])


def test_what_a_warning_tells_has_ended_nothing() -> None:
    assert read_log(IN_ONE_PROCESS) == ("RuntimeError: an illegal memory access", ["mm", "acme"])


def test_of_processes_ended_by_a_signal_the_one_in_a_plugin_is_reported() -> None:
    why, names = read_log(ABORTED)
    assert why == "Fatal Python error: Aborted" and names == ["_launch", "sort", "sort_stable"]


def test_a_log_without_a_cause_reports_nothing() -> None:
    assert read_log("INFO 11-26 10:00:00 [core.py:1] starts\n") == ("", [])
