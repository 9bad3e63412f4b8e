"""Threads that start at once, forks during startup, forks of forks, and spawn.

Each test runs in a separate interpreter with a deadline: a deadlock is a failure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

DEADLINE = 300

PLUGIN = """
import os, time
from vllm_fl import BackendImplKind, OpImpl, hookimpl

def acme_op(x):
    return x + 1

def broken(x):
    raise ValueError("boom")

@hookimpl
def register_ops():
    with open(os.environ["STARTS"], "a") as starts:
        print(os.getpid(), file=starts)
    time.sleep(0.1)  # long enough that the others arrive meanwhile
    return [
        OpImpl("acme_op", "vendor.acme", BackendImplKind.VENDOR, acme_op, "acme"),
        OpImpl("acme_op", "vendor.beta", BackendImplKind.VENDOR, acme_op, "beta"),
        OpImpl("fragile", "vendor.acme", BackendImplKind.VENDOR, broken, "acme"),
        OpImpl("fragile", "reference.torch", BackendImplKind.REFERENCE, acme_op),
    ]
"""

HEAD = """
import os, signal, sys, threading, time
from vllm_fl.dispatch import (
    call_op, get_default_manager, get_policy, set_global_policy, SelectionPolicy
)
manager = get_default_manager()

def wait_for_a_start():
    until = time.monotonic() + 200
    while not os.path.exists(os.environ["STARTS"]):
        assert time.monotonic() < until
        time.sleep(0.005)

def in_child(work):
    # the child's assertions are its exit status
    child = os.fork()
    if child == 0:
        signal.alarm(200)  # ends a child that hangs
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, "the child hangs" if status == -signal.SIGALRM else "the child failed"
"""


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts = folder / "starts"
        (folder / "acme_plugin.py").write_text(PLUGIN)

    def __call__(self, code: str, **env: str) -> str:
        """Run `code` after HEAD and return its stderr; raise if it fails or times out."""
        script = self.folder / "script.py"
        script.write_text(HEAD + dedent(code))
        ours = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_FL_")}
        ours |= {
            "PYTHONPATH": os.pathsep.join([str(self.folder), *sys.path]),
            "STARTS": str(self.starts),
            "VLLM_FL_PLUGIN_MODULES": "acme_plugin",
            "VLLM_FL_PLUGINS": "acme_plugin",
        }
        command = [sys.executable, "-W", "ignore::DeprecationWarning", str(script)]
        done = subprocess.run(
            command, env=ours | env, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stderr


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_32_threads_make_the_first_call_at_once(run: Run) -> None:
    log = run(
        """
        together = threading.Barrier(32, timeout=300)
        results = []

        def work():
            together.wait()
            results.append(call_op("acme_op", 1))

        threads = [threading.Thread(target=work) for _ in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert results == [2] * 32, results
        """
    )
    assert len(run.starts.read_text().splitlines()) == 1
    assert log.count("Op 'acme_op' using 'vendor.acme'") == 1


def test_a_fork_while_another_thread_starts(run: Run) -> None:
    run(
        """
        thread = threading.Thread(target=lambda: call_op("acme_op", 1))
        thread.start()
        wait_for_a_start()

        def child():
            assert call_op("acme_op", 1) == 2
            assert manager.get_selected_impl_id("acme_op") == "vendor.acme"
            impls = manager.registry.snapshot().impls_by_op["acme_op"]
            assert [i.impl_id for i in impls] == ["vendor.acme", "vendor.beta"]

        in_child(child)
        in_child(lambda: in_child(child))
        thread.join(20)
        assert call_op("acme_op", 1) == 2
        """
    )
    assert len(run.starts.read_text().splitlines()) == 1


def test_forks_while_other_threads_resolve_register_and_change_the_policy(run: Run) -> None:
    run(
        """
        from vllm_fl import BackendImplKind, OpImpl

        call_op("acme_op", 1)
        stop = threading.Event()

        def busy():
            while not stop.is_set():
                set_global_policy(SelectionPolicy())
                call_op("acme_op", 1)

        def registering():
            def slowly():
                stop.wait(0.01)
                return
                yield

            while not stop.is_set():
                manager.registry.register_many(slowly())

        threads = [threading.Thread(target=f, daemon=True) for f in (busy, busy, registering)]
        for thread in threads:
            thread.start()

        def child():
            assert call_op("acme_op", 1) == 2
            set_global_policy(SelectionPolicy(prefer="vendor"))
            manager.registry.register_impl(
                OpImpl("late", "reference.late", BackendImplKind.REFERENCE, lambda x: x)
            )
            assert call_op("late", 7) == 7

        for _ in range(10):
            in_child(child)
        stop.set()
        """
    )


def test_a_child_keeps_the_policy_and_checks_again_what_is_broken(run: Run) -> None:
    run(
        """
        from vllm_fl import BackendImplKind, OpImpl

        set_global_policy(SelectionPolicy(prefer="vendor"))
        assert call_op("fragile", 1) == 2
        assert manager.demotions and manager.fallbacks
        probed = []
        impl = OpImpl(
            "acme_op", "reference.probed", BackendImplKind.REFERENCE, lambda x: x,
            available=lambda: probed.append(os.getpid()) or True,
        )
        assert impl.is_available() and impl.is_available()
        assert probed == [os.getpid()]

        def child():
            assert not manager.demotions and not manager.fallbacks
            assert get_policy() == SelectionPolicy(prefer="vendor")
            assert manager.get_selected_impl_id("fragile") == "vendor.acme"
            assert call_op("fragile", 1) == 2
            assert manager.demotions
            assert impl.is_available()  # on its own device
            assert probed[1:] == [os.getpid()]

        in_child(child)
        assert list(manager.demotions) == [("fragile", "vendor.acme")]
        """
    )


def test_spawn_gives_the_same_selection(run: Run) -> None:
    run(
        """
        import multiprocessing

        def selection(policy):
            assert {policy: 1}.get(get_policy()) == 1, "an equal policy hashes differently here"
            return (
                [i.impl_id for i in manager.resolve_candidates("acme_op")],
                call_op("acme_op", 1),
                str(get_policy()),
            )

        if __name__ == "__main__":
            here = selection(get_policy())
            assert here[0] == ["vendor.beta", "vendor.acme"], here
            with multiprocessing.get_context("spawn").Pool(2) as pool:
                for result in (pool.apply_async(selection, (get_policy(),)) for _ in range(2)):
                    assert result.get(30) == here
        """,
        VLLM_FL_PER_OP="acme_op=vendor:beta|vendor",
    )
