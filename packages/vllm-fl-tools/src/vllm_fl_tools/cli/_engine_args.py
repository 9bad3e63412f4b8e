"""Parses engine arguments for vLLM from a command line, like `vllm serve`.

It imports vLLM on demand, because verbs import this module and may run without vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_fl.errors import VllmFLError

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


class WrongArguments(ValueError):
    """vLLM rejects the user's arguments; the text is the reason."""


def arguments_of(model: str, words: Sequence[str]) -> EngineArgs:
    """Return the engine arguments of a command line.

    Arguments of only the server, such as `--port`, are accepted and ignored.

    Args:
        model: the model's folder, or another name that vLLM accepts.
        words: the other arguments.

    Raises:
        WrongArguments: vLLM does not know an argument, or rejects its value.
        VllmFLError: a setting is invalid, for example.
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
            try:  # slow: it imports the server
                from vllm.entrypoints.cli.serve import ServeSubcommand
            except ImportError:
                raise error from None
            verbs = FlexibleArgumentParser().add_subparsers()
            read = _read(ServeSubcommand().subparser_init(verbs), words)
        return EngineArgs.from_cli_args(read)
    except VllmFLError:  # some are a ValueError
        raise
    except (ValueError, TypeError) as error:  # from the type of a value
        raise WrongArguments(str(error)) from error


def _read(parser: Any, words: list[str]) -> Any:
    def refuse(message: str) -> Any:
        raise WrongArguments(message)

    parser.error = refuse
    return parser.parse_args(words)
