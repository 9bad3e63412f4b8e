"""vLLM's arguments of an engine, read from a command line as `vllm serve` reads them.

Imports vLLM only when it is asked: verbs import this module, and may run where there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


class WrongArguments(ValueError):
    """vLLM does not take the arguments that the user gave; its text says why."""


def arguments_of(model: str, words: Sequence[str]) -> EngineArgs:
    """The arguments of an engine that serves `model`.

    Those of the server alone, such as `--port`, are read and change nothing.

    Args:
        model: the model's folder, or what else vLLM takes for a model.
        words: what else stands on the command line.

    Raises:
        WrongArguments: vLLM knows one of them not, or not with this value.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = ["--model", model, *words]
    try:
        try:
            read = _read(EngineArgs.add_cli_args(FlexibleArgumentParser(add_help=False)), words)
        except WrongArguments as error:
            if not str(error).startswith("unrecognized arguments"):
                raise
            try:  # slow: it has the server, too
                from vllm.entrypoints.cli.serve import ServeSubcommand
            except ImportError:
                raise error from None
            verbs = FlexibleArgumentParser().add_subparsers()
            read = _read(ServeSubcommand().subparser_init(verbs), words)
        return EngineArgs.from_cli_args(read)
    except (ValueError, TypeError) as error:  # what a value's own type raises
        raise WrongArguments(str(error)) from error


def _read(parser: Any, words: list[str]) -> Any:
    def refuse(message: str) -> Any:
        raise WrongArguments(message)

    parser.error = refuse
    return parser.parse_args(words)
