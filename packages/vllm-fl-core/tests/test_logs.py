"""Logging: on stderr unless the user has configured it, and never twice."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from vllm_fl.logs import get_logger, set_log_level


def stderr_of(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == ""
    return done.stderr


SAY = "from vllm_fl.logs import get_logger; get_logger('dispatch').info('said %s', 1)"


@pytest.mark.parametrize(
    "setup",
    [
        "",
        "import logging; logging.getLogger('vllm').addHandler(logging.StreamHandler())",
        "import logging; logging.basicConfig(level='INFO')",
    ],
)
def test_a_line_reaches_stderr_exactly_once(setup: str) -> None:
    assert stderr_of(f"{setup}\n{SAY}").count("said 1") == 1


def test_a_program_that_sets_up_logging_later_gets_it_alone() -> None:
    later = f"{SAY}\nimport logging; logging.basicConfig(format='%(message)s')\n"
    assert stderr_of(f"{later}get_logger().warning('again')").endswith("\nagain\n")


def test_levels() -> None:
    code = (
        "from vllm_fl.logs import get_logger, set_log_level\n"
        "get_logger().debug('one'); set_log_level('debug'); get_logger('a').debug('two')\n"
        "set_log_level(40, 'a'); get_logger('a').warning('three'); get_logger('b').info('four')"
    )
    text = stderr_of(code)
    assert [word for word in ("one", "two", "three", "four") if word in text] == ["two", "four"]


def test_names_and_an_unknown_level() -> None:
    assert get_logger() is get_logger("vllm_fl") is logging.getLogger("vllm_fl")
    assert get_logger("dispatch") is logging.getLogger("vllm_fl.dispatch")
    assert get_logger("vllm_fl.dispatch") is get_logger("dispatch")
    assert len(get_logger().handlers) == 1
    before = get_logger().level
    with pytest.raises(ValueError, match="LOUD"):
        set_log_level("loud")
    assert get_logger().level == before
