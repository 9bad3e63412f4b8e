"""Keeps the first faulty call of each implementation of an engine (VLLM_FL_KEEP_FAULTS).

A file has the safetensors format: the arguments that are tensors, and JSON in the metadata with
their strides and the other arguments. Large weights are references to the checkpoint. If arguments
exceed the limit, only their shapes and digests are kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

from vllm_fl.contracts import OpSpec, Sample
from vllm_fl.dispatch.record import BY_GUARD
from vllm_fl.logs import get_logger
from vllm_fl.plugins.types import OpImpl
from vllm_fl.settings.schema import Settings
from vllm_fl.text import clean, quote
from vllm_fl_tools.atomic_write import Draft
from vllm_fl_verify.guarded import bits
from vllm_fl_verify.oracle import MEASURED_OUTPUTS, magnitudes
from vllm_fl_verify.verification import dtype_name

from .identity import cpu_name, device_name
from .state_file import of_worker

FORMAT = "vllm_fl_fault_1"
"""The key of the JSON text, with the version of the contents."""

LARGE = 2**20
"""Minimum bytes of a weight that is looked up in the checkpoint."""

DIGESTED = 2**16
"""Approximate number of elements, at equal distances, in the digest of a tensor."""

PART_ROWS = 16
"""Maximum rows of a call if only parts of its weights are kept."""

Named = dict[str, Any]

log = get_logger("engine")


class Faults:
    """Keeps faulty calls of one engine; its methods never raise.

    A thread writes each file, because a file system may be slow.
    """

    def __init__(self, engine: Any) -> None:
        settings = engine.facts.settings
        self.folder = Path(settings.keep_faults).absolute()
        self.most = int(settings.keep_faults_mb) * 10**6
        self._engine, self._is_said = engine, False
        self._kept: dict[tuple[str, str], bool] = {}
        """(op, impl id) -> whether the kept call is unsupported, not incorrect."""
        with self._harmless():
            self.folder.mkdir(parents=True, exist_ok=True)
            Draft(self.folder / "test").__exit__()

    def wants(self, op: str, impl_id: str, refused: bool = False) -> bool:
        """Return whether to keep a call: the first one, or the first incorrect one."""
        return self._kept.get((op, impl_id), True) and not (refused and (op, impl_id) in self._kept)

    def keep(
        self,
        spec: OpSpec,
        impl: OpImpl,
        why: str,
        call: Callable[[], Sample],
        refused: bool = False,
    ) -> str:
        """Keep a call unless one was kept before.

        Args:
            spec: the contract.
            impl: the implementation.
            why: the fault.
            call: returns the call, with arguments on any device. Its scale is NaN if unknown.
            refused: whether the fault is only that the implementation does not support the call.

        Returns:
            The end of a message, with the file; or an empty string.
        """
        key, engine, device = (spec.name, impl.impl_id), self._engine, self._engine.device
        if not self.wants(*key, refused) or torch.compiler.is_compiling():
            return ""
        with self._harmless(), torch.inference_mode():
            module = torch.get_device_module(device)
            if getattr(module, "is_current_stream_capturing", bool)():
                return ""  # a copy would end the capture
            self._kept[key] = refused
            sample = call()
            tensors, facts = pack_call(spec, sample, self.most, self._find)
            is_late = sample.name == BY_GUARD and not refused
            facts |= {
                "impl_id": impl.impl_id,
                "reason": clean(why),
                "overwritten": sorted(spec.consumed(impl.consumes, sample.args)) * is_late,
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "rank": engine.rank,
                "device": cpu_name() if device.type == "cpu" else device_name(device),
            }
            name = re.sub(r"[^\w.-]", "_", ".".join(key))
            path = of_worker(self.folder / f"{name}.safetensors", engine.rank, engine.replica)
            given = path, tensors, facts, "unsupported" if refused else "faulty"
            threading.Thread(target=self._write, args=given, name="vllm-fl-fault").start()
            return f"; its arguments are in {path}"
        return ""

    def _write(self, path: Path, tensors: Named, facts: Named, kind: str) -> None:
        with self._harmless():
            with Draft(path) as draft:
                draft.put(contents(tensors, facts))
            text = "%s: kept the first %s call of '%s' for op '%s' (rank %d) in %s: %s"
            about = (facts[name] for name in ("impl_id", "op", "rank"))
            log.warning(text, Settings.keep_faults.variable, kind, *about, path, facts["reason"])

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Suppress exceptions of the block, and log the first one."""
        try:
            yield
        except Exception as error:
            if not self._is_said:
                self._is_said = True
                text = "%s: a call cannot be kept in %s (%s)"
                log.warning(text, Settings.keep_faults.variable, self.folder, quote(error))

    def _find(self, weight: torch.Tensor) -> Mapping[str, str]:
        """Return where a parameter of the model is in the checkpoint; empty if unknown."""
        from safetensors import safe_open

        every = (each for m in self._engine.models.values() for each in m.named_parameters())
        name = next((name for name, p in every if p.data_ptr() == weight.data_ptr()), "")
        with suppress(Exception):  # such as another format of the checkpoint
            folder = _folder_of(self._engine.config.model_config)
            for file in sorted(folder.glob("*.safetensors")) if name else ():
                with safe_open(file, "pt") as opened:
                    has = name in opened.keys()  # noqa: SIM118
                    found = opened.get_tensor(name) if has else weight[:0]
                if found.shape == weight.shape and tensor_digest(found) == tensor_digest(weight):
                    return {"folder": str(folder), "file": file.name, "tensor": name}
        return {}


def _folder_of(model: Any) -> Path:
    """Return the folder of a model's checkpoint on this machine."""
    if Path(model.model).is_dir():
        return Path(model.model).absolute()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))


def pack_call(
    spec: OpSpec, sample: Sample, most: int, find: Callable[[torch.Tensor], Mapping[str, str]]
) -> tuple[Named, Named]:
    """Return (tensors, facts) of a call, on the CPU.

    Args:
        spec: the contract.
        sample: the call. Its scale is NaN if unknown.
        most: maximum bytes of the tensors.
        find: large weight -> `folder`, `file` and `tensor` of the checkpoint; empty if unknown.
    """
    own = _tensors(spec, sample.args)
    large = (n for n, x in own.items() if x.nbytes >= LARGE and not spec.has_rows(n, x))
    known = {n: where for n in large if (where := find(own[n]))}
    args = _fewer(spec, sample.args, most, known)
    tensors: Named = {}
    about: Named = {n: {"value": arg} for n, arg in spec.named(args).items()}
    generator = torch.Generator("cpu").manual_seed(random.SystemRandom().getrandbits(63))
    for name, x in sorted(_tensors(spec, args).items(), key=lambda item: item[1].nbytes):
        overlaps = any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True))
        stride = torch.empty(x.shape, device="meta").stride() if overlaps else x.stride()
        facts = about[name] = {
            "dtype": dtype_name(x.dtype),
            "shape": [*x.shape],
            "stride": [*stride],
        }
        if name in known and x is own[name]:
            facts |= known[name]
        elif x.nbytes <= most:
            most -= x.nbytes
            tensors[name] = x.detach().to("cpu", copy=True).contiguous()
            has_ids = x.dtype in (torch.int32, torch.int64) and spec.has_rows(name, x)
            if has_ids and not spec.whole_batch:  # such as positions
                order = torch.randperm(len(x), generator=generator, device="cpu")
                tensors[name], facts["shuffled"] = tensors[name][order], True
        facts["digest"] = tensor_digest(tensors.get(name, x))
    kept = {name: getattr(sample, name) for name in ("name", "relaid", "enlarged")}
    return tensors, {
        "op": spec.name,
        "schemas": _schemas(spec),
        "sample": {**kept, "open_rows": [n for n in sample.open_rows if n < spec.tokens(args)]},
        "scale": None if math.isnan(sample.scale) else sample.scale,
        "tokens": [spec.tokens(each) for each in (args, sample.args)],
        "args": about,
    }


def contents(tensors: Named, facts: Named) -> bytes:
    """Return the contents of a file."""
    from safetensors.torch import save

    text = json.dumps(facts)
    return bytes(save(tensors, {FORMAT: text, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


def read(path: Path) -> tuple[Named, Named]:
    """Return (tensors, facts) of a file.

    Raises:
        ValueError: the file is damaged, or of another kind.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as opened:
            text = opened.metadata()[FORMAT]
            if hashlib.sha256(text.encode()).hexdigest() != opened.metadata()["sha256"]:
                raise ValueError("another checksum")
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            return tensors, json.loads(text)
    except Exception as error:
        why = f"is not a file of VLLM_FL_KEEP_FAULTS, or is damaged ({quote(error)})"
        raise ValueError(f"{path} {why}") from error


def unpacked(path: Path, tensors: Named, facts: Named, spec: OpSpec, device: Any) -> Sample:
    """Return the call of a file, with its arguments on `device`.

    Raises:
        ValueError: the contract has another version, or an argument is not available.
    """
    if facts["schemas"] != (here := _schemas(spec)):
        what = f"was kept with another version of the op {spec.name}"
        raise ValueError(f"{path} {what}: {facts['schemas']}; here: {here}")
    args = [
        about["value"] if "value" in about else _laid(path, name, tensors, about).to(device)
        for name, about in facts["args"].items()
    ]
    scale: Any = facts["scale"]
    if scale is None:
        scale = magnitudes(spec, args)
        if not all(isinstance(output, MEASURED_OUTPUTS) for output in spec.outputs):
            scale = float(torch.as_tensor(scale).amax())
    return Sample(args=tuple(args), scale=scale, **facts["sample"])


def _laid(path: Path, name: str, tensors: Named, about: Named) -> torch.Tensor:
    """Return an argument in memory with its strides."""
    from safetensors import safe_open

    found, file = tensors.get(name), Path(about.get("file", ""))
    for folder in (Path(about.get("folder", "")), path.parent):
        if found is None and (folder / file.name).is_file():
            with safe_open(folder / file.name, "pt") as opened:
                found = opened.get_tensor(about["tensor"])
    if found is None or tensor_digest(found) != about["digest"]:
        which = f"{about['tensor']} of {file.name}, next to it" if file.name else "a higher limit"
        what = f"has no valid {name} {tuple(about['shape'])} {about['dtype']}"
        raise ValueError(f"{path} {what}: it needs {which}")
    laid = torch.empty_strided(about["shape"], about["stride"], dtype=found.dtype)
    return laid.copy_(found)


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return a digest of elements at equal distances; empty if flattening needs a copy."""
    if not tensor.is_contiguous():
        return ""
    flat = bits(tensor.detach()).view(-1)
    some = flat[:: max(1, len(flat) // DIGESTED)].contiguous().cpu()
    return hashlib.sha256(some.view(torch.uint8).numpy().data).hexdigest()


def _schemas(spec: OpSpec) -> list[str]:
    """Return the data that identify the version of a contract."""
    return [variant.schema for variant in spec.variants]


def _tensors(spec: OpSpec, args: Sequence[Any]) -> dict[str, torch.Tensor]:
    return {n: arg for n, arg in spec.named(args).items() if isinstance(arg, torch.Tensor)}


def _fewer(spec: OpSpec, args: Sequence[Any], most: int, known: Named) -> Sequence[Any]:
    """Return the call; if it is too large, with fewer rows and only the weights that they read."""
    found, count = args, spec.tokens(args)
    while count > 1 and not spec.whole_batch:
        sizes = (x.nbytes for n, x in _tensors(spec, found).items() if n not in known)
        if sum(sizes) <= most:
            return found
        count = min(count // 2, PART_ROWS if spec.part else count)
        found = spec.with_changed_rows(args, itemgetter(slice(count)))
        found = spec.part(*found) if spec.part else found
    return args if count > 1 else found
