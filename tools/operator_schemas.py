"""Write core's table of vLLM operator schemas, from the sdists of vLLM's releases.

    python tools/operator_schemas.py FOLDER

FOLDER contains at least one sdist of every supported minor release (`pip download --no-deps
--no-binary vllm vllm==X`). The table contains operators that bindings refer to, and operators that
vLLM reads whenever it compiles a model. The schemas are those of vLLM's CUDA build, which
out-of-tree devices mirror.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[1] / "packages" / "vllm-fl-core" / "src"
TABLE = SOURCES / "vllm_fl" / "integration" / "schemas.json"

CUDA_BUILD = re.compile(r"csrc/(libtorch_stable/)?(moe/)?torch_bindings\.cpp")
"""Files that define the operators of the CUDA build."""

PASS = "vllm/compilation/passes/utility/fix_functionalization.py"
"""The pass over compiled graphs that reads operators on every platform. Other passes that read
operators are imported only for CUDA, ROCm and XPU."""

_STRING = r'"(?:[^"\\]|\\.)*"'
_DEFINITION = re.compile(rf"\.def\(\s*((?:{_STRING}\s*)+)")
_BLOCK = re.compile(r"TORCH_LIBRARY\w*\((?:CONCAT\((\w+),\s*(\w+)|(\w+))")
_COMMENT = re.compile(r"^\s*//.*$", re.M)
_READ = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.default")
_PROBED = re.compile(r'hasattr\(\s*torch\.ops\.(\w+),\s*"(\w+)"')


def defined(source: str, extension: str) -> Iterator[tuple[str, str]]:
    """Yield (operator, schema) of each definition in a C++ file.

    Args:
        source: text of the file.
        extension: value of the macro TORCH_EXTENSION_NAME.
    """
    source = _COMMENT.sub("", source)
    blocks = [
        (at.start(), "".join(at.groups("")).replace("TORCH_EXTENSION_NAME", extension))
        for at in _BLOCK.finditer(source)
    ]
    for found in _DEFINITION.finditer(source):
        namespace = [name for start, name in blocks if start < found.start()][-1]
        text = "".join(ast.literal_eval(part) for part in re.findall(_STRING, found[1]))
        schema = f"{namespace}::{' '.join(text.split())}"
        yield schema.partition("(")[0].strip(), schema


def probed(source: str) -> set[str]:
    """Operators that a Python file tests with `hasattr`."""
    return {"::".join(names) for names in _PROBED.findall(source)}


def read(source: str) -> set[str]:
    """Operators that a Python file uses without testing whether they exist."""
    return {"::".join(names) for names in _READ.findall(source)} - probed(source)


def facts(sdist: Path) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """Read the operators of one release.

    Returns:
        (operator -> its schema and source file, the operators that `PASS` reads).

    Raises:
        ValueError: an operator has two schemas, or vLLM tests the existence of an operator that
            `PASS` reads. core defines such operators without a kernel, so the test would succeed
            wrongly.
    """
    schemas: dict[str, tuple[str, str]] = {}
    asked: set[str] = set()
    wanted: set[str] = set()
    with tarfile.open(sdist) as archive:
        for member in archive:
            file = member.name.partition("/")[2]
            compiled = CUDA_BUILD.fullmatch(file)
            if not compiled and not (file.startswith("vllm/") and file.endswith(".py")):
                continue
            stream = archive.extractfile(member)
            source = stream.read().decode() if stream else ""
            if compiled:
                for name, schema in defined(source, "_moe_C" if compiled[2] else "_C"):
                    if schemas.setdefault(name, (schema, file))[0] != schema:
                        raise ValueError(f"{sdist.name}: {name} has two different schemas")
            else:
                asked |= probed(source)
                if file == PASS:
                    wanted = read(source)
    if asked & wanted:
        raise ValueError(f"{sdist.name}: vLLM probes for {', '.join(sorted(asked & wanted))}")
    return schemas, wanted


def table(found: Mapping[tuple[int, int], Iterable[Any]], names: Iterable[str]) -> dict[str, Any]:
    """Build the table.

    Args:
        found: minor release -> results of `facts`, one for each of its sdists.
        names: operators to include even if `PASS` does not read them.

    Raises:
        ValueError: two sdists of a minor release differ, or no file defines an operator of vLLM
            that `PASS` reads.
    """
    spans: dict[tuple[str, str, bool], dict[str, Any]] = {}
    for minor, several in sorted(found.items()):
        release = ".".join(map(str, minor))
        (schemas, wanted), *others = several
        if any(other != (schemas, wanted) for other in others):
            raise ValueError(f"the sdists of {release} differ")
        wanted = {name for name in wanted if name.startswith("_")}  # without torch's operators
        if lost := wanted - schemas.keys():
            raise ValueError(f"{release}: no schema found for {', '.join(sorted(lost))}")
        for name in sorted({*names, *wanted} & schemas.keys()):
            schema, source = schemas[name]
            reader = name in wanted
            span = spans.setdefault(
                (name, schema, reader),
                {"schema": schema, "read": reader, "first": release, "last": "", "sources": []},
            )
            span["last"] = release
            if source not in span["sources"]:
                span["sources"].append(source)
    return {
        "made_by": "tools/operator_schemas.py, from the sdists of vLLM's releases",
        "read_by": PASS,
        "operators": [span for _, span in sorted(spans.items())],
    }


def bound() -> set[str]:
    """Operators that bindings refer to."""
    sys.path.insert(0, str(SOURCES))
    from vllm_fl.contracts.binding import OperatorTarget
    from vllm_fl.integration.targets import targets
    from vllm_fl.plugins.registry import known_contracts

    return {target.name for _, target in targets(known_contracts().bindings, OperatorTarget)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="directory of the sdists")
    found: dict[tuple[int, int], list[Any]] = {}
    for sdist in sorted(parser.parse_args().folder.glob("vllm-*.tar.gz")):
        version = re.match(r"vllm-(\d+)\.(\d+)", sdist.name)
        assert version, sdist
        found.setdefault((int(version[1]), int(version[2])), []).append(facts(sdist))
    contents = table(found, bound())
    TABLE.write_text(json.dumps(contents, indent=1) + "\n")
    releases = ", ".join(".".join(map(str, minor)) for minor in sorted(found))
    print(f"{TABLE}: {len(contents['operators'])} schemas of vLLM {releases}")


if __name__ == "__main__":
    main()
