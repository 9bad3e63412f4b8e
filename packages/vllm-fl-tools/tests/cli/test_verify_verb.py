"""`vllm-fl verify`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from commands import SOUND, Command, Plugin

MANY = """
def plus_one(x):
    return silu_and_mul(x) + 1

def infinite(x):
    return silu_and_mul(x) * float("inf")

def broken(x):
    print("loading the device table")
    raise OSError("the device table is missing")

@hookimpl
def register_ops():
    return [
        act("acme"),
        act("off", plus_one),
        act("infinite", infinite),
        act("broken", broken),
        act("picky", supports=lambda x: x.dim() != 3 or "two dimensions only"),
        act("absent", available=lambda: "no absent card"),
        act("careless", supports=lambda x: x.no_such_attribute),
    ]
"""
OTHER_BITS = """
def by_batch(x):
    return silu_and_mul(x) * (1 + 2e-7 * (x.shape[0] > 100))

@hookimpl
def register_ops():
    return [act("acme"), act("bybatch", by_batch)]
"""
SELDOM = """
CALLS = iter(range(999))

def seldom(x):
    if next(CALLS, 0) == 50:
        raise OSError("the launch failed")
    return silu_and_mul(x)

@hookimpl
def register_ops():
    return [act("seldom", seldom)]
"""
REFUSING = """
@hookimpl
def register_ops():
    return [act("refusing", supports=lambda x: False)]
"""
INTERRUPTED = """
def stop(x):
    raise KeyboardInterrupt

@hookimpl
def register_ops():
    return [act("acme"), act("late", stop), act("never")]
"""
SLOW = """
import time

def slow(x):
    if x.numel() != HANGS:
        return silu_and_mul(x)
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass  # a kernel's own clean-up does not keep it running

@hookimpl
def register_ops():
    return [act("acme"), act("slow", slow)]
"""
ENDS = """
import os

def ends(x):
    return silu_and_mul(x) if x.shape[0] == 1 else os.abort()

@hookimpl
def register_ops():
    return [act("ends", ends)]
"""
QUICK = ("--device", "cpu", "--dtype", "float32")


def by_impl(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["impl_id"]: result for result in answer["results"]}


def test_a_sound_one_in_every_dtype(fl: Command, plugin: Plugin) -> None:
    plugin()
    done = fl("verify", "--json", "--device", "cpu")
    assert done.status == 0
    answer = done.json()
    assert [r["dtype"] for r in answer["results"]] == ["float32", "float16", "bfloat16"]
    for result in answer["results"]:
        assert (result["op"], result["impl_id"], result["kind"], result["vendor"]) == (
            "silu_and_mul",
            "vendor.acme",
            "vendor",
            "acme",
        )
        counts = Counter(result["samples"])
        assert counts.total() == counts["ok"] > 5
        assert 0 < result["worst"] <= 1
        assert result["worst_sample"]
        assert result["findings"] == []
        assert result["seconds"] > 0
    assert answer["environment"]["emulated"] is None and answer["complete"] is True


def test_bits_that_depend_on_the_batch_are_reported_and_are_not_a_fault(
    fl: Command, plugin: Plugin
) -> None:
    plugin(OTHER_BITS)
    done = fl("verify", *QUICK, "--json")
    assert done.status == 0
    found = by_impl(done.json())
    assert found["vendor.acme"]["determinism"] == {"runs": True, "batches": True, "reason": ""}
    other = found["vendor.bybatch"]["determinism"]
    assert (other["runs"], other["batches"]) == (True, False)
    printed = fl("verify", *QUICK).out
    assert f"silu_and_mul vendor.bybatch: different bits: {other['reason']} (float32)" in printed
    assert "runs, batches" in printed


@pytest.mark.parametrize(
    ("body", "reason"),
    [(SELDOM, "the launch failed"), (REFUSING, "`supports` returned no reason")],
)
def test_status_1_of_sound_samples(fl: Command, plugin: Plugin, body: str, reason: str) -> None:
    plugin(body)
    done = fl("verify", *QUICK)
    assert (done.status, reason in done.out) == (1, True)


def test_what_a_support_matrix_needs(fl: Command, plugin: Plugin) -> None:
    plugin(f"KERNEL_DISTRIBUTIONS = ('pluggy', 'not-installed')\n{SOUND}")
    emulated = ("--emulated", "Acme's simulator", *QUICK)
    answer = fl("verify", "--json", *emulated).json()
    environment = answer["environment"]
    assert environment["emulated"] == "Acme's simulator"
    assert "EMULATED (Acme's simulator)" in fl("verify", *emulated).out
    assert environment["distributions"]["torch"]
    assert environment["distributions"]["pluggy"] == version("pluggy"), "it runs its code"
    assert "not-installed" not in environment["distributions"]
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["device"]["type"] == "cpu"
    assert environment["device"]["name"]
    assert answer["date"].endswith("+00:00")


def test_each_is_judged_on_its_own_and_says_why(fl: Command, plugin: Plugin) -> None:
    plugin(MANY)
    done = fl("verify", "--json", *QUICK)
    assert done.status == 1
    assert "loading the device table" in done.err  # never into the JSON
    results = by_impl(done.json())
    total = Counter(results["vendor.acme"]["samples"]).total()
    states = {name: set(+Counter(r["samples"])) for name, r in results.items()}
    assert states == {
        "vendor.acme": {"ok"},
        "vendor.off": {"ok", "wrong"},  # with 0 tokens no result can be incorrect
        "vendor.infinite": {"ok", "wrong"},
        "vendor.broken": {"raised"},
        "vendor.picky": {"ok", "refused"},
        "vendor.careless": {"raised"},
    }
    assert all(Counter(r["samples"]).total() == total for r in results.values())
    assert results["vendor.off"]["worst"] > 1
    assert results["vendor.infinite"]["worst"] is None  # JSON has no infinity
    assert "the device table is missing" in results["vendor.broken"]["findings"][0]["reason"]
    assert "no_such_attribute" in results["vendor.careless"]["findings"][0]["reason"]
    refusal, enlarged = results["vendor.picky"]["findings"]
    assert enlarged == {**refusal, "sample": "3-D, 300 rows"}
    assert refusal == {
        "sample": "3-D",
        "status": "refused",
        "share": None,
        "reason": "two dimensions only",
    }
    (left,) = done.json()["not_run"]
    assert (left["impl_id"], left["reason"]) == ("vendor.absent", "not available: no absent card")
    printed = fl("verify", *QUICK).out.splitlines()
    (line,) = [line for line in printed if line.startswith("silu_and_mul vendor.off: incorrect: ")]
    assert (
        f", and {results['vendor.off']['samples']['wrong'] - 1} more samples, the worst by" in line
    )


def test_filters(fl: Command, plugin: Plugin) -> None:
    plugin(MANY)
    done = fl("verify", "--json", *QUICK, "--impl", "vendor.acme", "--impl", "vendor.picky")
    assert done.status == 0
    assert set(by_impl(done.json())) == {"vendor.acme", "vendor.picky"}, "refusals are no finding"
    done = fl("verify", *QUICK, "--impl", "vendor.absent")
    assert done.status == 1
    assert "no absent card" in done.out
    assert "No implementation was run, for these reasons." in done.out


def test_implementations_that_no_oracle_judges(fl: Command, plugin: Plugin) -> None:
    plugin(
        """
        from vllm_fl import AttentionImpl, LayerImpl

        def wiggle(x):
            return x

        @hookimpl
        def register_ops():
            return [vendor("acme", wiggle)]

        @hookimpl
        def attention_backend():
            return [AttentionImpl("vendor.acme", "acme.Backend", BackendImplKind.VENDOR, "acme")]

        @hookimpl
        def layers():
            yield LayerImpl("RowParallelLinear", "a.Row", BackendImplKind.VENDOR, "acme")
        """
    )
    done = fl("verify", "--json", *QUICK)
    assert done.status == 1
    reasons = {left["op"]: left["reason"] for left in done.json()["not_run"]}
    assert set(reasons) == {"wiggle", "attention_backend", "RowParallelLinear"}
    assert "contract" in reasons["wiggle"]
    assert reasons["RowParallelLinear"] == "it is a class for vLLM, not a function"


@pytest.mark.parametrize(("mistake", "status"), [("", 0), (" + 1", 1)])
def test_one_that_takes_a_layer_first_is_judged(
    fl: Command, plugin: Plugin, mistake: str, status: int
) -> None:
    plugin(
        f"""
        def norm(self, x, residual=None):
            total = x.double() if residual is None else x.double() + residual.double()
            size = self.variance_size_override or x.shape[-1]
            mean = total[..., :size].pow(2).mean(-1, keepdim=True)
            out = total * (mean + self.variance_epsilon).rsqrt(){mistake}
            if self.has_weight:
                out = out * self.weight.double()
            return out.to(x.dtype) if residual is None else (out.to(x.dtype), total.to(x.dtype))

        @hookimpl
        def register_ops():
            return [act("acme", norm, "rms_norm")]
        """
    )
    done = fl("verify", "--json", *QUICK)
    assert done.status == status
    (result,) = done.json()["results"]
    wrong = [finding for finding in result["findings"] if finding["status"] != "refused"]
    assert (wrong == []) is (status == 0)
    refused = {found["sample"] for found in result["findings"] if found["status"] == "refused"}
    assert {"weight=None", "variance_size"} <= refused  # it only gets plain layers


@pytest.mark.parametrize(
    "args",
    [
        ("--dtype", "int4"),
        ("--op", "rms_nrom"),
        ("--impl", "vendor.absent"),
        ("--device", "toaster"),
        ("--device", "cuda:99"),
    ],
)
def test_wrong_usage_is_status_2_and_one_line(
    fl: Command, plugin: Plugin, args: tuple[str, str]
) -> None:
    plugin()
    done = fl("verify", *args)
    assert (done.status, done.out) == (2, "")
    (message,) = done.err.splitlines()
    assert args[1] in message and message.endswith("[FL701]")


class TestALongRun:
    def test_ctrl_c_leaves_what_was_done(self, fl: Command, plugin: Plugin) -> None:
        plugin(INTERRUPTED)
        done = fl("verify", *QUICK)
        assert done.status == 130
        assert "vendor.acme" in done.out
        assert "interrupted: 1 of 3 done" in done.err
        assert "Traceback" not in done.err
        done = fl("verify", "--json", *QUICK)
        assert done.status == 130
        answer = done.json()
        assert answer["complete"] is False
        assert set(by_impl(answer)) == {"vendor.acme"}

    @pytest.mark.slow
    def test_a_sample_that_takes_too_long_is_given_up_by_name(
        self, fl: Command, plugin: Plugin
    ) -> None:
        plugin(SLOW.replace("!= HANGS", "< 0"))
        done = fl("verify", "--json", *QUICK, "--timeout", "3")
        assert done.status == 1
        results = by_impl(done.json())
        assert results["vendor.acme"]["findings"] == []
        first, second, rest = results["vendor.slow"]["findings"]
        assert first["status"] == second["status"] == rest["status"] == "raised"
        assert "timed out after 3 s" in first["reason"] and "--timeout" in first["reason"]
        assert rest["sample"] == "(the rest)" and "2 samples" in rest["reason"]

    def test_a_call_that_never_comes_back_ends_the_run_by_name(
        self, plugin: Plugin, tmp_path: Path
    ) -> None:
        """Native code ignores signals: here a thread that only the operating system can end."""
        plugin(SLOW.replace("time.sleep(0.01)", "signal.pthread_sigmask(*BLOCKED); time.sleep(99)"))
        (source,) = tmp_path.glob("fl_plugin_*.py")
        head = "import signal\nBLOCKED = signal.SIG_BLOCK, [signal.SIGALRM]\n"
        source.write_text(head + source.read_text().replace("!= HANGS", "< 0"))
        done = by_itself(
            tmp_path, "--json", *QUICK, "--timeout", "1", settings="_watch.GRACE = 0.2"
        )
        assert done.returncode == 1
        answer = json.loads(done.stdout)
        assert answer["complete"] is False and set(by_impl(answer)) == {"vendor.acme"}
        assert (
            b"vendor.slow float32" in done.stderr
            and b"hangs and cannot be interrupted" in done.stderr
        )

    def test_a_kernel_that_ends_the_process_is_in_the_last_line(
        self, plugin: Plugin, tmp_path: Path
    ) -> None:
        plugin(ENDS)
        done = by_itself(tmp_path, *QUICK)
        assert done.returncode == -signal.SIGABRT
        *_, last = [line for line in done.stderr.splitlines() if line.startswith(b"[")]
        assert last.endswith(b"] silu_and_mul vendor.ends float32")

    @pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon"])
    def test_a_limit_is_a_number_of_seconds(self, fl: Command, plugin: Plugin, text: str) -> None:
        plugin()
        done = fl("verify", f"--timeout={text}")
        assert done.status == 2 and text in done.err


def by_itself(path: Path, *args: str, settings: str = "") -> subprocess.CompletedProcess[bytes]:
    """`vllm-fl verify` in its own process, with other `settings` of the progress."""
    script = "import sys\nfrom vllm_fl_tools.cli import _progress as it, main\n"
    script += "from vllm_fl_tools.cli import _watch\n"
    script += f"it.QUIET = 3600.0\n{settings}\n"  # a busy machine is slow to import a plugin
    before = os.environ.get("PYTHONPATH", "")
    return subprocess.run(
        [sys.executable, "-c", f"{script}sys.exit(main())", "verify", *args],
        env={**os.environ, "PYTHONPATH": f"{path}:{before}", "TERM": "xterm", "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=300,
    )


def test_what_errs_to_one_side_is_wrong_in_all_samples(fl: Command, plugin: Plugin) -> None:
    plugin(
        """
        import torch

        def cut_off(x):
            bits = silu_and_mul(x.float()).view(torch.int32) & -(1 << 16)
            return bits.view(torch.float32).to(x.dtype)

        @hookimpl
        def register_ops():
            return [act("acme", cut_off)]
        """
    )
    done = fl("verify", "--json", "--device", "cpu", "--dtype", "bfloat16")
    assert done.status == 1
    (result,) = done.json()["results"]
    (finding,) = result["findings"]
    assert (finding["sample"], finding["status"]) == ("(all samples)", "wrong")
    assert "too small by 0.5" in finding["reason"]
    assert 0 < result["worst"] == finding["share"] < 1, "each of them is right"
