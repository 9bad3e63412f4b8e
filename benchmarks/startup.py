"""Measure the time of a process before its first call: `import vllm_fl`, discovery, plugins.

Each round is a new interpreter with existing byte code. Plugins are generated: a folder with
modules and the metadata of distributions, on the path of the subprocess. Their imports are not
measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import Figure, MeasurementFailed, figure, paired, ratios

__all__ = ["measure"]

ROUNDS = 15
HEAVY = ("torch", "vllm", "triton", "numpy", "flag_gems", "torch_npu")

MEMORY = """
with open("/proc/self/status") as status:
    peak = next(line for line in status if line.startswith("VmHWM:"))
print(int(peak.split()[1]) / 1024)
"""
"""Print the peak resident memory of the process in MiB. ru_maxrss would start with the parent's."""

IMPORTED = f"""
import sys, vllm_fl
print(sum(name in sys.modules for name in {HEAVY!r}))
"""

COLD = """
from vllm_fl.dispatch import get_default_manager
get_default_manager().ensure_initialized()
"""

START = """
import json, sys, time
modules, ops = json.loads(sys.argv[1])
for module in modules:
    __import__(module)
from vllm_fl.dispatch import get_default_manager

manager = get_default_manager()
start = time.perf_counter()
manager.ensure_initialized()
started = time.perf_counter()
for op in ops:
    manager.resolve(op)
resolved = time.perf_counter()
plugins = manager.startup.plugins
print(json.dumps({
    "loaded": sum(p.status == "ok" for p in plugins),
    "impls": len(manager.registry.snapshot().owners),
    "start": (started - start) * 1e3,
    "resolve": (resolved - started) * 1e3,
}))
"""

PLUGIN = """
from pathlib import Path

from vllm_fl import BackendImplKind, OpImpl, PolicyDefaults, hookimpl


def silu_and_mul(x):
    return x


def supports(x):
    return True


def rms_norm(x, residual, weight, epsilon, variance_size=None):
    return x


OPS = {{"silu_and_mul": silu_and_mul, "rms_norm": rms_norm}}
OPS |= {{f"op_{{n}}": silu_and_mul for n in range({ops} - len(OPS))}}


@hookimpl
def register_ops():
    return [
        OpImpl(
            op, "vendor.{name}", BackendImplKind.VENDOR, fn, "{name}",
            available=lambda: True, supports=None if op == "rms_norm" else supports,
        )
        for op, fn in OPS.items()
    ]


@hookimpl
def policy(platform):
    return PolicyDefaults(Path(__file__).with_name("bench_{name}.yaml"))
"""

POLICY = """\
op_backends:
  silu_and_mul:
    eager: [vendor, flagos, reference]
    compiled: [reference, flagos, vendor]
"""


class Interpreter:
    """New interpreters with a shared byte code cache: `Interpreter(folder)("-c", code)`."""

    def __init__(self, cache: str) -> None:
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        self.environment = {**kept, "PYTHONPYCACHEPREFIX": cache}

    def __call__(self, *args: str, **variables: str) -> str:
        """Run the interpreter, and return its output."""
        done = subprocess.run(
            [sys.executable, *args],
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise MeasurementFailed(f"a subprocess failed:\n{done.stderr[-3000:]}")
        return done.stdout


def measure(options: argparse.Namespace) -> list[Figure]:
    """Measure the startup of a process."""
    rounds = options.rounds or ROUNDS
    with tempfile.TemporaryDirectory() as cache:
        python = Interpreter(cache)
        return [
            *importing(python, rounds),
            *cold(python, rounds),
            *discovery(python, rounds),
            *many_plugins(python, rounds),
        ]


def importing(python: Interpreter, rounds: int) -> list[Figure]:
    """`import vllm_fl` compared with an empty program: time, memory, and heavy imports."""
    bare: list[float] = []
    ours: list[float] = []
    for n in range(rounds + 1):
        pair = [(bare, "pass"), (ours, "import vllm_fl")]
        for runs, code in pair if n % 2 else reversed(pair):
            start = time.perf_counter()
            python("-c", code)
            runs.append((time.perf_counter() - start) * 1e3)
    memory = {
        code: [float(python("-c", code + MEMORY)) for _ in range(rounds)]
        for code in ("", "import vllm_fl")
    }
    heavy = [float(python("-c", IMPORTED))]
    return [
        # The first rounds fill the page cache.
        figure(
            "import vllm_fl over the bare interpreter", "ms", paired(ours[1:], bare[1:]), at_most=60
        ),
        figure("  memory", "MiB", paired(memory["import vllm_fl"], memory[""]), at_most=15),
        figure(f"  modules imported of {', '.join(HEAVY)}", "modules", heavy, at_most=0),
    ]


def cold(python: Interpreter, rounds: int) -> list[Figure]:
    """From the start of the interpreter until the first call is possible."""
    bare: list[float] = []
    ours: list[float] = []
    for n in range(rounds + 1):
        pair = [(bare, "pass"), (ours, COLD)]
        for runs, code in pair if n % 2 else reversed(pair):
            start = time.perf_counter()
            python("-c", code, VLLM_FL_LOG_LEVEL="WARNING", VLLM_FL_PLUGINS="")
            runs.append((time.perf_counter() - start) * 1e3)
    return [
        figure("cold start without torch, no plugin loaded", "ms", ours[1:]),
        figure("  over the bare interpreter", "ms", paired(ours[1:], bare[1:])),
        figure("  as a multiple of it", "", ratios(ours[1:], bare[1:])),
    ]


def discovery(python: Interpreter, rounds: int) -> list[Figure]:
    """Five plugins of four ops, found among all installed distributions."""
    started, _ = start(python, plugins=5, ops=4, rounds=rounds)
    return [figure("discovery of 5 plugins beside their imports", "ms", started, at_most=100)]


def many_plugins(python: Interpreter, rounds: int) -> list[Figure]:
    """Discovery and resolution of fifty plugins with twenty ops."""
    started, resolved = start(python, plugins=50, ops=20, rounds=rounds)
    return [
        figure("start with 50 plugins of 20 ops beside their imports", "ms", started, at_most=500),
        figure("  and resolving each op once", "ms", resolved),
    ]


def start(
    python: Interpreter, plugins: int, ops: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Milliseconds from imported plugins to effective settings, and to resolve each op."""
    starts, resolves = [], []
    with tempfile.TemporaryDirectory() as folder:
        names = [f"p{n:02}" for n in range(plugins)]
        for name in names:
            install(Path(folder), name, ops)
        modules = [f"bench_{name}" for name in names]
        resolved = ["silu_and_mul", "rms_norm", *(f"op_{n}" for n in range(ops - 2))]
        environment = {
            "PYTHONPATH": folder,
            # Find other installed plugins, but do not load them.
            "VLLM_FL_PLUGINS": ",".join(f"bench-{name}" for name in names),
            "VLLM_FL_LOG_LEVEL": "WARNING",
        }
        for n in range(rounds + 1):
            request = json.dumps([modules, resolved])
            answer: dict[str, Any] = json.loads(python("-c", START, request, **environment))
            if (answer["loaded"], answer["impls"]) != (plugins, plugins * ops):
                raise MeasurementFailed(
                    f"{answer['loaded']} of {plugins} plugins were loaded, with "
                    f"{answer['impls']} of {plugins * ops} implementations"
                )
            if n > 0:  # the first round fills the page cache and compiles byte code
                starts.append(answer["start"])
                resolves.append(answer["resolve"])
    return starts, resolves


def install(folder: Path, name: str, ops: int) -> None:
    """Write the files of the distribution `bench-NAME`, like pip."""
    (folder / f"bench_{name}.py").write_text(PLUGIN.format(name=name, ops=ops))
    (folder / f"bench_{name}.yaml").write_text(POLICY)
    info = folder / f"bench_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bench-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm_fl.plugin]\n{name} = bench_{name}\n")
