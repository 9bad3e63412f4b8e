"""What people run beside a server of vllm-fl, and never in it: it tests, measures and compares."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

TOOLS, CORE = "vllm-fl-tools", "vllm-fl-core"


def _check_versions() -> None:
    """Say it where core is of another version: what the verbs use of it may be another, too.

    Raises:
        VerbError: it is.
    """
    try:
        tools, core = version(TOOLS), version(CORE)
    except PackageNotFoundError:  # a copy on the path, which nobody can hold to a version
        return
    if tools != core:
        from vllm_fl.cli.common import VerbError

        raise VerbError(
            f"{TOOLS} {tools} works with {CORE} {tools}, and {CORE} {core} is installed: "
            f"pip install '{TOOLS}=={core}', or '{CORE}[tools]=={tools}'",
            distribution=f"{TOOLS} {tools}",
        )


_check_versions()
