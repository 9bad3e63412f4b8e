"""torch_npu's wheel, read as data: its schemas and the source of its meta functions."""

from __future__ import annotations

import functools
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import yaml

__all__ = ["META", "VERSION", "WheelMissing", "compiled", "meta_source", "schemas"]

VERSION = "2.13.0"
VARIABLE = "TORCH_NPU_WHEEL"

SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
META = "torch_npu/op_plugin/meta/_meta_registrations.py"
SECTIONS = ("custom", "custom_autograd", "symint", "quant")


class WheelMissing(RuntimeError):
    """The environment variable is not the wheel's path; the message has the command to run."""


def wheel() -> Path:
    """The wheel at the path TORCH_NPU_WHEEL; WheelMissing if it is unset or another release."""
    named = os.environ.get(VARIABLE, "")
    path = Path(named)
    if named and path.is_file() and path.name.startswith(f"torch_npu-{VERSION}-"):
        return path
    found = f"{VARIABLE} is {named!r}" if named else f"{VARIABLE} is not set"
    raise WheelMissing(
        f"{found}, which is no wheel of torch_npu {VERSION}. The tests read it as data; "
        f"`nox -s tests-ascend` fetches it, or: pip download --no-deps torch-npu=={VERSION}"
    )


def schemas() -> Iterator[str]:
    """Every operator schema of the wheel, in the form that its compiled library registers. The
    generator renames the YAML's argument `self` to `input`, like the strings in
    torch_npu/lib/libtorch_npu.so."""
    sections = yaml.load(_read(SCHEMAS), yaml.CSafeLoader)
    seen = set()
    for section in SECTIONS:
        for entry in sections.get(section) or ():
            schema = entry["func"] if isinstance(entry, dict) else entry
            name = schema.partition("(")[0]
            if name not in seen and name != schema:  # ATen's operators are listed by name only
                seen.add(name)
                yield re.sub(r"(Tensor\S*) self\b", r"\1 input", schema)


def meta_source() -> str:
    """The Python source that registers the meta functions."""
    return _read(META).decode()


def compiled(schema: str) -> bool:
    """Whether the wheel's compiled library contains this exact schema."""
    return schema.encode() in _library()


@functools.cache
def _library() -> bytes:
    return _read("torch_npu/lib/libtorch_npu.so")


def _read(name: str) -> bytes:
    with zipfile.ZipFile(wheel()) as archive:
        return archive.read(name)
