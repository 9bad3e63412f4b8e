"""Measure the agreement of the ranks of an engine: seconds, and bytes over the network.

The ranks are processes without an engine in a separate network namespace, whose loopback has no
other traffic. Each sends the verdict of a plan of the installed backends, like at each startup.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys

from figures import Figure, MeasurementFailed, figure

__all__ = ["measure"]

RANKS = (2, 16)
ROUNDS = 20
LIMIT = 300

PROCESSES = """
import json, os, pickle, socket, sys, time
from datetime import timedelta
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist

from vllm_fl.dispatch import get_default_manager
from vllm_fl.engine.digest import fingerprint
from vllm_fl.engine.facts import EngineFacts
from vllm_fl.engine.plan import make_plan
from vllm_fl.integration.exchange import exchange
from vllm_fl.integration.ranks import Opinion

ranks, rounds = map(int, sys.argv[1:])
manager = get_default_manager()
manager.ensure_initialized()
snapshot = manager.registry.snapshot()
facts = EngineFacts(manager.startup.settings, "eager", dtype=torch.bfloat16)
plan = make_plan(manager, facts)
contents = fingerprint(plan, snapshot.owners, snapshot.authors)
torch.set_num_threads(1)

group = SimpleNamespace(world_size=ranks, cpu_group=None)
for name in ("vllm", "vllm.distributed", "vllm.distributed.parallel_state"):
    sys.modules[name] = ModuleType(name)  # of which `exchange` needs the group
sys.modules[name].get_world_group = lambda: group


def sent():
    with open("/proc/net/dev") as lines:
        return next(int(line.split()[9]) for line in lines if line.split()[0] == "lo:")


def serve(rank, port):
    group.rank = rank
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=60))
    group.cpu_group = dist.new_group(backend="gloo")
    mine = Opinion({}, contents, frozenset(snapshot.owners))
    exchange("settle", mine)  # connections are made at the first one
    measured = []
    for _ in range(rounds):
        dist.barrier(group.cpu_group)
        before, start = sent(), time.perf_counter()
        exchange("settle", mine)
        took = [None] * ranks
        seconds, traffic = time.perf_counter() - start, sent() - before
        dist.all_gather_object(took, seconds, group=group.cpu_group)
        measured.append((max(took), traffic))
    if rank == 0:
        print(json.dumps({"rounds": measured, "verdict": len(pickle.dumps(mine))}), flush=True)
    dist.barrier(group.cpu_group)
    os._exit(0)  # without the farewells of sixteen stores


with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
children = []
for rank in range(ranks):  # forked: torch is imported once
    children.append(os.fork())
    if not children[-1]:
        serve(rank, port)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
"""


def measure(options: argparse.Namespace) -> list[Figure]:
    """Measure the agreement of ranks."""
    for tool in ("unshare", "ip"):
        if shutil.which(tool) is None:
            raise MeasurementFailed(f"there is no {tool}, which gives the ranks their own network")
    found = []
    for ranks in RANKS:
        report = _run(ranks, options.rounds or ROUNDS)
        seconds, traffic = zip(*report["rounds"], strict=True)
        found += [
            figure(f"agreement of {ranks} ranks", "ms", [1e3 * each for each in seconds]),
            figure("  sent by all of them", "KiB", [each / 1024 for each in traffic]),
        ]
    return [*found, figure("  one rank's verdict", "KiB", [report["verdict"] / 1024])]


def _run(ranks: int, rounds: int) -> dict[str, list[tuple[float, int]]]:
    script = [sys.executable, "-c", PROCESSES, str(ranks), str(rounds)]
    alone = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        done = subprocess.run(
            [*alone, *script],
            env={**os.environ, "VLLM_FL_PREFER": "vendor"},  # a plan without stock
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT,
        )
    except subprocess.TimeoutExpired:
        raise MeasurementFailed(f"{ranks} ranks did not agree within {LIMIT} s") from None
    if done.returncode:
        raise MeasurementFailed(f"{ranks} ranks: {done.stderr[-800:]}")
    answer: dict[str, list[tuple[float, int]]] = json.loads(done.stdout.splitlines()[-1])
    return answer
