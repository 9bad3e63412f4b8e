"""The command `vllm-fl`: what is installed, what is chosen, and why. One file per verb."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from vllm_fl.errors import SettingsError, UnknownOpError, VllmFLError
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.text import INDENTED, clean

from ._progress import progress
from ._show import UsageError, answering, say
from ._verbs import VERBS, load

TOOLS = "vllm-fl-tools"
GOOD, FINDING, USAGE, INTERRUPTED = 0, 1, 2, 130

SHELL = "_ARGCOMPLETE"
"""The variable by which a shell asks for completions."""


class _Version(argparse.Action):
    """Print whose command this is: the distribution, its version, where it lies."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from vllm_fl.plugins.installed import installed_version

        where = str(__path__[0]).removesuffix("/cli")
        say(f"vllm-fl: {TOOLS} {installed_version(TOOLS) or '(not installed)'} from {where}")
        parser.exit(GOOD)


class NoTemporaryFolderError(VllmFLError):
    """There is no folder for temporary files, without which torch cannot be imported."""

    code = "FL520"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns:
        0: good. 1: a finding (a plugin that failed, an op without implementation). 2: usage, or
        a setting that is wrong. 130: Ctrl-C.
    """
    return _status_of(lambda: _answer(sys.argv[1:] if argv is None else [*argv]))


def _answer(words: Sequence[str]) -> int:
    """Run the verb that the words of a command line name."""
    parser = _parser(words)
    _complete(parser)
    arguments, more = parser.parse_known_args(words)
    if more and not arguments.takes_more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    arguments.more = more
    if arguments.verb != "explain":  # which has the page of what is said here
        _check_temporary_folder()
    with answering(), progress(arguments.verb, forks=arguments.verb == "doctor"):
        status: int = arguments.run(arguments)
    sys.stdout.flush()
    return status


def _check_temporary_folder() -> None:
    """torch and plugins fail without one, each in words of its own, and a second try may crash.

    Raises:
        NoTemporaryFolderError: there is none.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise NoTemporaryFolderError(
            f"torch cannot be imported: {error.strerror}. Set TMPDIR to a folder that may be "
            "written, or make /tmp one"
        ) from error


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """What reads these words.

    Where they begin with a verb, no other is imported. Else all are, since each is to be shown with
    its summary.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-fl",
        description="Which implementation of an operator runs in vLLM, and why.",
        epilog="Exit status: 0 good, 1 a finding, 2 usage or settings.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    asked = words[0] if words and SHELL not in os.environ else ""
    for name in [asked] if asked in VERBS else VERBS:
        summary, verb = load(name)
        sub = verbs.add_parser(name, help=summary.replace("%", "%%"), description=f"{summary}.")
        sub.add_argument("--json", action="store_true", help="print JSON for programs")
        sub.set_defaults(takes_more=False)
        verb.add_arguments(sub)
        sub.set_defaults(run=verb.run)
    return parser


def _status_of(answer: Callable[[], int]) -> int:
    """The exit status: the answer's own, or that of what ended it, which is told."""
    try:
        return answer()
    except BrokenPipeError:  # `vllm-fl plan | head`
        sys.stderr.close()
        return GOOD
    except VllmFLError as error:  # a missing file is an OSError, too
        say(f"vllm-fl: {clean(str(error), INDENTED)}", error=True)
        if isinstance(error, UsageError):  # all that there is to say is in the message
            return USAGE
        say(error.more, error=True)
        return USAGE if isinstance(error, SettingsError | UnknownOpError) else FINDING
    except OSError as error:  # a full disk, where the answer goes
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG):
            raise
        say(f"vllm-fl: the answer cannot be written: {error.strerror}", error=True)
        # What is left in the buffer would be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINDING
    except KeyboardInterrupt:
        say("vllm-fl: interrupted", error=True)
        return INTERRUPTED


def _complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and end the process, if it was the shell that asked."""
    if SHELL not in os.environ:  # spares every other run the import
        return
    import argcomplete

    for action in _actions(parser):
        if action.metavar == "OP":
            action.completer = _ops  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _actions(verb)


def _ops(**_: object) -> list[str]:
    """Return the ops of distributions that have only contracts: no plugin is loaded for this."""
    return [*known_contracts().contracts]
