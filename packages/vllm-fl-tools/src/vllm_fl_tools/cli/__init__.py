"""The command `vllm-fl`: shows what is installed and chosen, and why. One module per verb."""

from __future__ import annotations

import argparse
import errno
import gc
import os
import sys
import tempfile
from collections.abc import Sequence

from vllm_fl.errors import SettingsError, UnknownOpError, VllmFLError
from vllm_fl.plugins.registry import known_contracts
from vllm_fl.text import INDENTED, clean, closest

from ._progress import progress
from ._show import UsageError, answering, say
from ._verbs import READING, VERBS, load_verb
from ._watch import INTERRUPTED

TOOLS = "vllm-fl-tools"
GOOD, FINDING, USAGE = 0, 1, 2

SHELL = "_ARGCOMPLETE"
"""Variable that a shell sets to request completions."""


class _Version(argparse.Action):
    """Print the distribution, its version and its path."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from vllm_fl.plugins.installed import installed_version

        where = str(__path__[0]).removesuffix("/cli")
        say(f"vllm-fl: {TOOLS} {installed_version(TOOLS) or '(not installed)'} from {where}")
        parser.exit(GOOD)


class NoTemporaryFolderError(VllmFLError):
    """torch cannot be imported without a folder for temporary files."""

    code = "FL520"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Without `argv` it runs the command line of this process. A verb of `READING` then collects no
    garbage and ends the process, because collecting and freeing vLLM's modules takes seconds.

    Returns:
        0 for success; 1 for a finding, such as a failed plugin or an op without implementation; 2
        for invalid usage or an invalid setting; 130 for Ctrl-C.
    """
    try:
        return _answer(argv)
    except BrokenPipeError:  # `vllm-fl plan | head`
        sys.stderr.close()
        return GOOD
    except VllmFLError as error:  # before OSError, because some errors are both
        say(f"vllm-fl: {clean(str(error), INDENTED)}", error=True)
        if isinstance(error, UsageError):  # the message is sufficient
            return USAGE
        say(error.more, error=True)
        return USAGE if isinstance(error, SettingsError | UnknownOpError) else FINDING
    except OSError as error:  # for example, the disk of the output is full
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG):
            raise
        say(f"vllm-fl: cannot write the output: {error.strerror}", error=True)
        # The interpreter would write the rest of the buffer again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINDING
    except KeyboardInterrupt:
        say("vllm-fl: interrupted", error=True)
        return INTERRUPTED


def _answer(argv: Sequence[str] | None) -> int:
    if sys.stdout is None:
        raise UsageError("the output is closed")
    words = sys.argv[1:] if argv is None else [*argv]
    parser = _parser(words)
    _complete(parser)
    if not words:
        parser.print_help()
        return GOOD
    if words[0] not in VERBS and words[0].isalpha() and (meant := closest(words[0], VERBS)):
        parser.error(f"{words[0]!r} is not a verb.{meant}")
    arguments, more = parser.parse_known_args(words)
    if more and not arguments.takes_more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    arguments.more = more
    if arguments.verb != "explain":  # this verb prints the page of the error
        _check_temporary_folder()
    ends = argv is None and arguments.verb in READING
    if ends:
        gc.disable()
    with answering(), progress(arguments.verb, forks=arguments.verb in ("bisect", "doctor")):
        status: int = arguments.run(arguments)
    sys.stdout.flush()
    if ends:
        os._exit(status)
    return status


def _check_temporary_folder() -> None:
    """Raise NoTemporaryFolderError early: torch and plugins would fail with misleading errors."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise NoTemporaryFolderError(
            f"torch cannot be imported: {error.strerror}. Set TMPDIR to a writable folder, or make "
            "/tmp writable"
        ) from error


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of a command line.

    If the line begins with a verb, only that verb is imported. Otherwise all verbs are imported, to
    show their summaries.
    """
    parser = argparse.ArgumentParser(
        prog="vllm-fl",
        description="Show, verify and choose the implementations of vLLM's operators.",
        epilog="Exit status: 0 success, 1 a finding, 2 incorrect usage or settings.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    asked = words[0] if words and SHELL not in os.environ else ""
    for name in [asked] if asked in VERBS else VERBS:
        summary, example, verb = load_verb(name)
        sub = verbs.add_parser(name, help=summary.replace("%", "%%"))
        sub.description = f"{summary[:1].upper()}{summary[1:]}."
        sub.formatter_class = argparse.RawDescriptionHelpFormatter
        sub.add_argument("--json", action="store_true", help="print JSON for programs")
        sub.set_defaults(takes_more=False)
        verb.add_arguments(sub)
        for action in sub._actions:
            if action.metavar == "OP":
                action.completer = _ops  # type: ignore[attr-defined]
        sub.epilog = "\n".join(filter(None, [sub.epilog, example]))
        sub.set_defaults(run=verb.run)
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Print completions and exit, if a shell requests them."""
    if SHELL not in os.environ:  # avoids the import in other runs
        return
    import argcomplete

    argcomplete.autocomplete(parser)


def _ops(**_: object) -> list[str]:
    """Return the ops of contract distributions, without loading plugins."""
    return [*known_contracts().contracts]
