"""A real Ray cluster of nodes on this machine, each with its own packages and variables."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import envs

HOST = "127.0.0.1"
"""Every node's address: vLLM compares the engine's address with its node's address."""

RAY = ("-m", "ray.scripts.scripts")
OBJECT_STORE = 100 << 20
"""Bytes of shared memory per node."""

LIMIT = 90
"""Timeout in seconds for the nodes of a cluster to find each other."""


@dataclass(frozen=True)
class Node:
    """A machine with one device, counted by Ray as a GPU; `variables` are in addition to common
    ones."""

    env: envs.Env
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """A running cluster: its head's address, for `RAY_ADDRESS`, and the parent process of each
    node."""

    address: str
    processes: tuple[subprocess.Popen[bytes], ...]

    def workers(self, node: int) -> list[psutil.Process]:
        """The processes of a node that run a vLLM worker."""
        children = psutil.Process(self.processes[node].pid).children(recursive=True)
        return [child for child in children if "ray::RayWorkerProc" in " ".join(_command(child))]


@contextlib.contextmanager
def cluster(*nodes: Node) -> Iterator[Cluster]:
    """Start these nodes, the first as the head; end all their processes on exit."""
    # A short path, because socket names are made from it.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    address = f"{HOST}:{_free_port()}"
    started: list[subprocess.Popen[bytes]] = []
    try:
        for node in nodes:
            where = (f"--address={address}",)
            if not started:
                port = f"--port={address.rpartition(':')[2]}"
                where = ("--head", port, "--include-dashboard=false", f"--temp-dir={folder}")
            started.append(_start(node, *where, log=Path(folder) / f"node{len(started)}.log"))
            _wait(nodes[0].env, address, len(started), started)
        yield Cluster(address, tuple(started))
    except NotReady as error:
        logs = "\n".join(p.read_text()[-2000:] for p in sorted(Path(folder).glob("node*.log")))
        raise NotReady(f"{error}:\n{logs}") from None
    finally:
        for process in reversed(started):
            _end(process)
        shutil.rmtree(folder, ignore_errors=True)


class NotReady(RuntimeError):
    """A cluster did not start; the message has the output of its nodes."""


def _start(node: Node, *where: str, log: Path) -> subprocess.Popen[bytes]:
    options = ("--num-cpus=1", "--num-gpus=1", f"--object-store-memory={OBJECT_STORE}")
    quiet = ("--disable-usage-stats", f"--node-ip-address={HOST}", "--block")
    with log.open("wb") as out:
        return subprocess.Popen(
            [node.env.python, *RAY, "start", *where, *options, *quiet],
            env=node.env.variables(**node.variables),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def _wait(
    env: envs.Env, address: str, count: int, processes: list[subprocess.Popen[bytes]]
) -> None:
    """Wait until this many nodes are in the cluster."""
    code = (
        "import sys, ray\n"
        "from ray._private.state import GlobalState\n"
        "from ray._raylet import GcsClientOptions\n"
        "state = GlobalState()\n"
        "state._initialize_global_state(GcsClientOptions.create(sys.argv[1], None, True, True))\n"
        "print(sum(node['Alive'] for node in state.node_table()))\n"
    )
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if any(process.poll() is not None for process in processes):
            raise NotReady("A node ended")
        done = env.run("-c", code, address, check=False)
        if done.returncode == 0 and done.stdout.split()[-1:] == [str(count)]:
            return
        time.sleep(1)
    raise NotReady(f"{count} nodes did not find each other within {LIMIT} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a node and all its remaining processes."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    if process.poll() is None:
        process.kill()
        process.wait()
    for child in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(family, timeout=10)


def _command(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


__all__ = ["HOST", "Cluster", "Node", "NotReady", "cluster"]
