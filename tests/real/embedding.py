"""One run of vLLM's pooling runner in its own process.

python embedding.py '{"model": DIR, "texts": […], "options": {…}, "out": FILE}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(request: dict[str, Any]) -> None:
    """Write `vectors`, one per text, and vllm-fl's `report`, None for stock."""
    from vllm import LLM

    llm = LLM(request["model"], runner="pooling", **request["options"])
    vectors = [output.outputs.embedding for output in llm.embed(request["texts"], use_tqdm=False)]
    ours = os.environ.get("VLLM_FL_PREFER_ENABLED", "true") != "false"
    report = llm.collective_rpc("vllm_fl_report") if ours else None
    Path(request["out"]).write_text(json.dumps({"vectors": vectors, "report": report}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
