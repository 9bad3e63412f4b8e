"""Tables as a dataset of FlashInfer-Bench: contracts as Definitions, figures as Traces.

The form is that of flashinfer-bench 0.1.2 (https://github.com/flashinfer-ai/flashinfer-bench):
`definitions/OP/NAME.json`, and `traces/OP/NAME.jsonl` with one Trace a line. A Definition is one
call that a served model makes. What is no tensor is a constant of its reference, and what is None
is left out. Where a model calls an op in several forms, a table has the sum of their times, and the
Traces are those of one more Definition that makes all the calls.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import re
import tempfile
import textwrap
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from vllm_fl.cli.common import UsageError
from vllm_fl.contracts import ModelSizes, OpSpec
from vllm_fl.settings.table import Table, TunedOp

if TYPE_CHECKING:
    import torch

__all__ = ["Dataset", "definitions", "write"]

OPTION = "--flashinfer-bench"

DTYPES = (
    *("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("int64", "int32", "int16", "int8", "bool"),
)
"""The dtypes that a Definition can name and torch has by the same name."""

TOKENS = "tokens"
"""The axis that differs between workloads."""

UNKNOWN = "NaN"
"""An error that a table does not hold: it says within or beyond the contract's tolerance."""


@dataclass
class Dataset:
    """What is written.

    Args:
        definitions: name -> Definition.
        traces: name of its definition -> Traces.
        left_out: what could not be said, and why.
    """

    definitions: dict[str, dict[str, Any]] = field(default_factory=dict)
    traces: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)

    def add(self, table: Table, contracts: Mapping[str, OpSpec]) -> None:
        """The ops of a table, each by the contract of its name."""
        from vllm_fl.engine.identity import is_measured

        for op, tuned in sorted(table.ops.items()):
            spec = contracts.get(op)
            try:
                if spec is None:
                    raise Unsayable("no contract of this name is installed")
                if not is_measured(spec, tuned.contract):
                    raise Unsayable("it was measured by another version of its contract")
                largest = max((f.tokens for f in tuned.figures), default=1)
                calls = definitions(spec, table.sizes, table.dtype, largest)
            except Unsayable as error:
                self.left_out.append((op, str(error)))
                continue
            whole = calls[0] if len(calls) == 1 else _together(spec, calls)
            for one in {call["name"]: call for call in (*calls, whole)}.values():
                self.definitions[one["name"]] = one
            self.traces.setdefault(whole["name"], []).extend(_traces(whole, table, spec, tuned))

    def files(self) -> Iterator[tuple[str, str]]:
        """Path in the dataset -> content."""
        for name, one in sorted(self.definitions.items()):
            text = json.dumps(one, indent=2, ensure_ascii=False)
            yield f"definitions/{one['op_type']}/{name}.json", f"{text}\n"
        for name, traces in sorted(self.traces.items()):
            lines = [json.dumps(trace, ensure_ascii=False) + "\n" for trace in traces]
            yield f"traces/{self.definitions[name]['op_type']}/{name}.jsonl", "".join(lines)


class Unsayable(Exception):
    """A Definition has no words for it."""


def write(dataset: Dataset, path: str) -> Path:
    """Put it there, whole or not at all.

    Raises:
        UsageError: something is there already, or it cannot be written.
    """
    target = Path(os.path.realpath(path))
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{OPTION} {path}: is there already, and no empty folder")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            draft = Path(scratch) / "dataset"
            draft.mkdir()
            for name, text in dataset.files():
                file = draft / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text, encoding="utf-8")
            os.replace(draft, target)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{OPTION} {path}: cannot be written: {why}") from error
    return target


def definitions(
    spec: OpSpec, sizes: Mapping[str, float], dtype: str, largest: int
) -> list[dict[str, Any]]:
    """A Definition for each call of the op that a model of these sizes makes.

    Args:
        spec: the op's contract.
        sizes: of the model, by name.
        dtype: the model's, as torch names it.
        largest: the most tokens of a call.

    Raises:
        Unsayable: one of its tensors has a dtype that Definitions have no name for, the contract
            does not have the model's dtype, or sizes that the calls need are not told.
    """
    import torch

    from vllm_fl.contracts.batches import POOL

    if dtype not in spec.dtypes:
        raise Unsayable(f"its contract has no {dtype}")
    served = replace(_model(sizes), tokens=(min(POOL, largest),))
    samples = list(spec.served(served, getattr(torch, dtype), torch.device("meta")))
    if not samples:
        raise Unsayable("its contract names no call of a model of these sizes")
    names = _axes(sizes)
    return [_definition(spec, s.name, s.args, names, dtype, served.tokens[0]) for s in samples]


def _axes(sizes: Mapping[str, float]) -> dict[int, str]:
    """Size -> the name of its axis, where one alone has it. Sizes that only some binding asks for
    name none that another one has."""
    whole = {name: int(size) for name, size in sizes.items() if size == int(size) > 1}
    own = {field.name for field in fields(ModelSizes)}
    held = Counter(size for name, size in whole.items() if name in own)
    further = Counter(size for name, size in whole.items() if name not in own)
    return {
        size: name
        for name, size in whole.items()
        if (held if name in own else held + further)[size] == 1
    }


def _model(sizes: Mapping[str, float]) -> ModelSizes:
    own = {f.name for f in fields(ModelSizes)} - {"tokens", "more"}
    told: dict[str, Any] = {
        name: value if name == "epsilon" else int(value)
        for name, value in sizes.items()
        if name in own
    }
    return ModelSizes(**told, more={n: v for n, v in sizes.items() if n not in own})


def _definition(
    spec: OpSpec,
    name: str,
    args: Sequence[Any],
    names: Mapping[int, str],
    dtype: str,
    tokens: int,
) -> dict[str, Any]:
    import torch

    given = {
        parameter: value
        for parameter, value in zip(spec.parameters, args, strict=True)
        if isinstance(value, torch.Tensor)
    }
    rows = {p: value.shape[0] for p, value in spec.with_rows(args).items()}
    fewer = [
        value[: rows[p] // 2] if p in rows else value
        for p, value in zip(spec.parameters, args, strict=True)
    ]
    axes: dict[str, dict[str, Any]] = {TOKENS: {"type": "var", "description": "rows of the call"}}

    def axis(size: int) -> str:
        word = names.get(size, f"d{size}")
        axes[word] = {"type": "const", "value": size}
        return word

    def tensor(what: str, value: torch.Tensor, by_token: Sequence[bool]) -> dict[str, Any]:
        known = str(value.dtype).removeprefix("torch.")
        if known not in DTYPES:
            raise Unsayable(f"{what} is {known}, for which a Definition has no name")
        shape = [TOKENS if t else axis(n) for n, t in zip(value.shape, by_token, strict=True)]
        return {"shape": shape, "dtype": known}

    inputs = {
        p: tensor(p, value, [n == 0 and p in rows for n in range(value.ndim)])
        for p, value in given.items()
    }
    results = list(zip(_results(spec.fake(*args)), _results(spec.fake(*fewer)), strict=True))
    outputs = {}
    for number, (result, other) in enumerate(results, 1):
        what = f"result_{number}" if len(results) > 1 else "result"
        by_token = [a != b for a, b in zip(result.shape, other.shape, strict=True)]
        for size, differs in zip(result.shape, by_token, strict=True):
            if differs and size != tokens:
                raise Unsayable(f"{what} has a size that follows from the tokens, and is no axis")
        outputs[what] = tensor(what, result, by_token)
    constants = [
        p if p in given else repr(value) for p, value in zip(spec.parameters, args, strict=True)
    ]
    form = re.sub(rf"\b{tokens} x ", "", name)
    dtypes = [out["dtype"] for out in outputs.values()]
    return _named(
        spec,
        form,
        axes=axes,
        inputs=inputs,
        outputs=outputs,
        reference=_reference(spec, list(inputs), constants, dtypes),
        tags=["vllm-fl", f"dtype:{dtype}"],
        description=f"The call: {form}.",
    )


def _together(spec: OpSpec, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One Definition that makes all these calls, as a model does between two layers."""
    made: dict[str, dict[str, Any]] = {"axes": {}, "inputs": {}, "outputs": {}}
    bodies, steps = [], []
    for number, call in enumerate(calls, 1):
        made["axes"] |= call["axes"]
        for kind in ("inputs", "outputs"):
            made[kind] |= {f"{name}_of_{number}": value for name, value in call[kind].items()}
        shared, _, body = call["reference"].partition(RUN)
        bodies.append(body.replace("def run(", f"def run_{number}("))
        step = f"run_{number}({', '.join(f'{name}_of_{number}' for name in call['inputs'])})"
        steps.append(f"        {step if len(call['outputs']) == 1 else f'*{step}'},")
    run = [f"def run({', '.join(made['inputs'])}):", "    return (", *steps, "    )"]
    names = ", ".join(call["name"] for call in calls)
    return _named(
        spec,
        f"{len(calls)} calls",
        **made,
        reference=shared + RUN + "\n\n".join([*bodies, "\n".join(run)]) + "\n",
        tags=calls[0]["tags"],
        description=f"All {len(calls)} calls that a model makes, one after the other: {names}.",
    )


def _named(spec: OpSpec, form: str, *, description: str, **content: Any) -> dict[str, Any]:
    """With a name of these words, and of a hash of the content: other sizes are another one."""
    summary = (inspect.getdoc(spec.oracle) or spec.name).partition("\n\n")[0].replace("\n", " ")
    whole = {"op_type": spec.name, **content, "description": f"{summary} {description}"}
    text = json.dumps(whole, sort_keys=True)
    word = re.sub(r"\W+", "_", f"{spec.name} {form}").strip("_")
    return {"name": f"{word}_{hashlib.sha256(text.encode()).hexdigest()[:8]}", **whole}


def _results(results: Any) -> list[torch.Tensor]:
    parts = results if isinstance(results, tuple | list) else (results,)
    return [part for part in parts if part is not None]


# ---------------------------------------------------------------------------------------------
# The reference's source

RUN = "# The calls:\n\n"


def _reference(
    spec: OpSpec, inputs: Sequence[str], arguments: Sequence[str], dtypes: Sequence[str]
) -> str:
    """Python that needs torch alone, and has the oracle's own source.

    Where the source is not to be had, or uses what has none, the oracle is imported.
    """
    sources: dict[str, str] = {}
    try:
        _gather(spec.oracle, sources)
    except Unsayable as error:
        module = spec.oracle.__module__
        if getattr(import_module(module), spec.name, None) is not spec.oracle:
            raise Unsayable(f"the oracle's source cannot be had: {error}") from error
        sources = {spec.name: f"from {module} import {spec.name}"}
    imports = ["from __future__ import annotations", "", "import torch"]
    imports += sorted(text for text in sources.values() if text.startswith(("import ", "from ")))
    imports = list(dict.fromkeys(imports))
    bodies = [text for text in sources.values() if not text.startswith(("import ", "from "))]
    named = ", ".join(f"torch.{dtype}" for dtype in dtypes)
    run = (
        f"def run({', '.join(inputs)}):\n"
        f"    return _rounded({spec.name}({', '.join(arguments)}), [{named}])\n"
    )
    return "\n\n".join(["\n".join(imports), *bodies, CAST, RUN + run])


CAST = '''\
def _rounded(results, dtypes):
    """The results, which are computed in fp64, in the dtypes of the outputs."""
    parts = results if isinstance(results, (tuple, list)) else (results,)
    parts = [part for part in parts if part is not None]
    rounded = tuple(part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True))
    return rounded if len(rounded) > 1 else rounded[0]
'''


def _gather(function: Callable[..., Any], sources: dict[str, str]) -> None:
    """The source of `function` and of all that it uses of its module, in order of need."""
    if not isinstance(function, FunctionType) or function.__closure__:
        raise Unsayable("its source depends on more than its module")
    for name in sorted(_names(function.__code__)):
        if name in sources or name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if isinstance(value, ModuleType):
            plain = value.__name__ == name
            sources[name] = f"import {name}" if plain else f"import {value.__name__} as {name}"
        elif isinstance(value, FunctionType) and value is not function:
            sources[name] = ""  # it may be recursive
            _gather(value, sources)
            if value.__name__ != name:
                raise Unsayable(f"{name} has another name in its own module")
        elif value is not function:
            sources[name] = f"{name} = {_literal(value)}"
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise Unsayable("it has no source") from error
    if not source.startswith("def "):
        raise Unsayable("it is decorated")
    sources.pop(function.__name__, None)
    sources[function.__name__] = source


def _names(code: CodeType) -> set[str]:
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _literal(value: object) -> str:
    """Source that gives this value."""
    text = repr(value)
    try:
        if ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError):
        pass
    raise Unsayable(f"{text:.40} cannot be written down")


# ---------------------------------------------------------------------------------------------
# Traces


def _traces(
    definition: Mapping[str, Any], table: Table, spec: OpSpec, tuned: TunedOp
) -> Iterator[dict[str, Any]]:
    name = definition["name"]
    libraries = {fact: told for fact, told in table.identity.items() if fact != "device"}
    environment = {
        "hardware": table.identity.get("device") or "unknown",
        "libs": {**libraries, "vllm-fl mode": table.mode},
    }
    correctness: dict[str, Any] = {"max_relative_error": UNKNOWN, "max_absolute_error": UNKNOWN}
    if (tolerance := spec.tolerances.get(table.dtype)) is not None:
        correctness["extra"] = {"rtol": tolerance.rtol, "atol": tolerance.atol}
    defaults = {f.tokens: f.us for f in tuned.figures if f.impl == tuned.default}
    for figure in tuned.figures:
        if figure.us is not None:
            default = defaults.get(figure.tokens) or 0.0
            told: dict[str, Any] = {
                "status": "PASSED",
                "correctness": correctness,
                "performance": {
                    "latency_ms": figure.us / 1e3,
                    "reference_latency_ms": default / 1e3,
                    "speedup_factor": figure.ratio or (default / figure.us if figure.us else 0.0),
                },
                "log": f"median of {figure.n}, quartiles {figure.low} and {figure.high} µs; the "
                f"reference's latency is that of the default, {tuned.default}",
            }
        elif figure.rejected:
            wrong = figure.rejected.startswith("wrong")
            told = {
                "status": "INCORRECT_NUMERICAL" if wrong else "RUNTIME_ERROR",
                "correctness": correctness if wrong else None,
                "log": figure.rejected,
            }
        else:
            continue  # nothing was found about it
        workload = {
            "axes": {TOKENS: figure.tokens},
            "inputs": {parameter: {"type": "random"} for parameter in definition["inputs"]},
            "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, f"{name} {figure.tokens}")),
        }
        yield {
            "definition": name,
            "workload": workload,
            "solution": f"{name}-{figure.impl}",
            "evaluation": {"environment": environment, "timestamp": table.date, **told},
        }
