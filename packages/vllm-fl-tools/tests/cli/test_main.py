"""Behaviour of all verbs: help, exit status, no traceback."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from commands import Command, Plugin

from vllm_fl.errors import InvalidSettingError, StartError
from vllm_fl_tools.cli import plan
from vllm_fl_tools.cli._engine_args import arguments_of

WRONG = {
    "nonsense": "doctor",
    "paln": "Did you mean 'plan'?",
    "plan --nonsense": "--nonsense",
    "explain": "required",
    "explain rms_norm --mode fast": "fast",
    "explain rms_nrom": "rms_norm",
    "explain FL999": "FL999",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_usage_is_status_2_and_one_message(fl: Command, plugin: Plugin, words: str) -> None:
    plugin()
    done = fl(*words.split())
    assert (done.status, done.out) == (2, "")
    assert "Traceback" not in done.err and WRONG[words] in done.err


def test_without_words_the_command_prints_its_help(fl: Command) -> None:
    done = fl()
    assert (done.status, done.err) == (0, "")
    assert done.out == fl("--help").out


def test_what_libraries_print_is_no_part_of_an_answer(fl: Command, plugin: Plugin) -> None:
    plugin(
        """
        import os, sys
        print("a library says hello", flush=True)

        def loud():
            print("and once more")
            return True

        @hookimpl
        def register_ops():
            return [vendor("acme", available=loud)]
        """
    )
    done = fl("plan", "--json")
    assert done.json()
    assert "hello" in done.err


def test_the_version(fl: Command) -> None:
    done = fl("--version")
    assert done.status == 0
    assert re.fullmatch(r"vllm-fl: vllm-fl-tools \d+\.\d+\S* from /.*/vllm_fl_tools\n", done.out)


def test_a_verb_that_reads_ends_its_process_without_freeing_modules() -> None:
    code = "import atexit; atexit.register(print, 'late'); from vllm_fl_tools.cli import main; "
    command = [sys.executable, "-c", f"{code} main()", "explain", "FL102"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("# FL102: ")
    assert not done.stdout.endswith("late\n")


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_fl_tools.cli", "explain", "FL102", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()  # a slow machine prints more
    assert last == "vllm-fl: cannot write the output: No space left on device"


def test_an_error_of_a_setting_that_vllm_passes_on_keeps_its_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: object) -> None:
        raise InvalidSettingError("VLLM_FL_ENABLED: it is 'fales'")

    parser = SimpleNamespace(EngineArgs=SimpleNamespace(add_cli_args=fail))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", parser)
    parser = SimpleNamespace(FlexibleArgumentParser=argparse.ArgumentParser)
    monkeypatch.setitem(sys.modules, "vllm.utils.argparse_utils", parser)
    with pytest.raises(InvalidSettingError):
        arguments_of("DIR", ())


def test_an_error_ends_with_its_code_and_the_command_that_explains_it(fl: Command) -> None:
    done = fl("plan", VLLM_FL_PREFER="hf_0123456789", HF_TOKEN="hf_0123456789")
    message, more = done.err.splitlines()
    assert (done.status, done.out) == (2, "") and message.endswith("[FL102]")
    assert "VLLM_FL_PREFER" in message and "<redacted>" in message and "hf_0" not in message
    (command,) = re.findall(r"`vllm-fl ([^`]+)`", more)
    # A wrong setting must not prevent its own explanation.
    explained = fl(*command.split(), VLLM_FL_PREFER="vendr")
    assert explained.status == 0 and explained.err == ""
    assert explained.out.startswith("# FL102: ")


def test_the_end_of_a_log_stays_lines(fl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> int:
        raise StartError("The engine plan failed. The end of its log:\nTraceback\nFL\x1b[1m")

    monkeypatch.setattr(plan, "run", run)
    done = fl("plan")
    assert done.status == 1
    assert done.err.splitlines() == [
        "vllm-fl: The engine plan failed. The end of its log: [FL501]",
        "    Traceback",
        "    FL\\x1b[1m",
        "Run `vllm-fl explain FL501` for causes and fixes.",
    ]
