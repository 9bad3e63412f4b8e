"""What all verbs share: help, exit status, no traceback."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from commands import Command, Plugin

from vllm_fl.errors import StartError
from vllm_fl_tools.cli import ops

VERBS = ("doctor", "explain", "ops", "plugins", "policy")


def test_help_lists_every_verb_with_a_summary(fl: Command) -> None:
    done = fl("--help")
    assert done.status == 0
    for verb in VERBS:
        (line,) = [line for line in done.out.splitlines() if line.split()[:1] == [verb]]
        assert len(line.split()) > 4


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(fl: Command, verb: str) -> None:
    done = fl(verb, "--help")
    assert done.status == 0
    assert "--json" in done.out


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("nonsense",),
        ("ops", "--nonsense"),
        ("explain",),
        ("explain", "rms_norm", "--mode", "fast"),
        ("explain", "rms_nrom"),
    ],
)
def test_wrong_usage_is_status_2_and_one_message(
    fl: Command, plugin: Plugin, args: tuple[str, ...]
) -> None:
    plugin()
    done = fl(*args)
    assert done.status == 2
    assert done.out == ""
    assert "Traceback" not in done.err
    assert "vllm-fl" in done.err


@pytest.mark.parametrize("verb", [("ops",), ("policy",), ("explain", "rms_norm")])
def test_a_wrong_setting_is_status_2_and_says_which(fl: Command, verb: tuple[str, ...]) -> None:
    done = fl(*verb, VLLM_FL_PREFER="vendr")
    assert done.status == 2
    assert "VLLM_FL_PREFER" in done.err and "vendor" in done.err
    assert done.out == ""


@pytest.mark.parametrize("verb", [("ops",), ("plugins",), ("explain", "silu_and_mul")])
def test_what_libraries_print_is_no_part_of_an_answer(
    fl: Command, plugin: Plugin, verb: tuple[str, ...]
) -> None:
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
    done = fl(*verb, "--json")
    assert done.json()
    assert "hello" in done.err


def test_a_secret_in_an_error_is_not_printed(fl: Command) -> None:
    done = fl("policy", VLLM_FL_PREFER="hf_0123456789", HF_TOKEN="hf_0123456789")
    assert done.status == 2
    assert "hf_0123456789" not in done.err
    assert "<redacted>" in done.err


def test_the_version(fl: Command) -> None:
    done = fl("--version")
    assert done.status == 0
    assert re.fullmatch(r"vllm-fl: vllm-fl-tools \d+\.\d+\S* from /.*/vllm_fl_tools\n", done.out)


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
    *_, last = done.stderr.splitlines()  # on a slow machine there is more
    assert last == "vllm-fl: the answer cannot be written: No space left on device"


@pytest.mark.parametrize("verb", ["ops", "policy"])
@pytest.mark.parametrize("variable", ["VLLM_FL_CONFIG", "VLLM_FL_OP_CONFIG"])
def test_a_settings_file_that_is_not_there(fl: Command, verb: str, variable: str) -> None:
    done = fl(verb, **{variable: "/not/there.yaml"})
    assert done.status == 2
    assert "'/not/there.yaml' does not exist" in done.err
    assert "Traceback" not in done.err


def test_an_error_ends_with_its_code_and_the_command_that_explains_it(fl: Command) -> None:
    done = fl("ops", VLLM_FL_PREFER="vendr")
    message, more = done.err.splitlines()
    assert message.endswith("[FL102]")
    (command,) = re.findall(r"`vllm-fl ([^`]+)`", more)
    # The setting that is wrong must not keep its own explanation away.
    explained = fl(*command.split(), VLLM_FL_PREFER="vendr")
    assert explained.status == 0 and explained.err == ""
    assert explained.out.startswith("# FL102: ")


def test_a_code_that_is_not_there_is_a_wrong_command_line(fl: Command) -> None:
    done = fl("explain", "FL999")
    assert (done.status, done.out) == (2, "")
    assert "FL999: there is no such code" in done.err and "FL102" in done.err


def test_the_end_of_a_log_stays_lines(fl: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> int:
        raise StartError("The engine plan failed. The end of its log:\nTraceback\nFL\x1b[1m")

    monkeypatch.setattr(ops, "run", run)
    done = fl("ops")
    assert done.status == 1
    assert done.err.splitlines() == [
        "vllm-fl: The engine plan failed. The end of its log: [FL501]",
        "    Traceback",
        "    FL\\x1b[1m",
        "`vllm-fl explain FL501` says what it means, and what to do.",
    ]
