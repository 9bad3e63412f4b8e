"""vLLM's arguments from a command line, with its parser and without."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the arguments are vLLM's")

from vllm_fl.integration.engine_args import arguments_of


@pytest.mark.parametrize("words", [[], ["--enforce-eager"]])
def test_where_no_parser_is_made_the_arguments_are_the_same(
    tmp_path: Path, words: list[str]
) -> None:
    model = str(tmp_path)
    assert arguments_of(model, words) == arguments_of(model, [*words, "--seed", "0"])
