"""Compare vllm-fl with stock on vLLM's CPU engine with Qwen3-0.6B's shapes, eager and compiled.

The engines of one mode are loaded together, each in its own process, and run one at a time: every
round visits all of them with each workload, in rotating order. Ratios are computed within a round,
so that other load on a shared machine affects both sides. The memory layout of a process changes
its speed by some percent: the rounds are spread over restarted engines, in another order. Other
load only makes steps longer: the speed of a visit is that of the fastest quarter of its steps.

Shapes: 28 layers, hidden 1024, intermediate 3072, 16 query and 8 key heads of 128, tied embeddings,
random weights. The vocabulary has 32768 entries instead of 151936, to fit four engines into 24 GiB.
With `--real FOLDER` the shipped order is also measured on that model, with its weights.
dtype: bfloat16 if the CPU has AVX-512, else float32 (without AVX-512, bfloat16 products of PyTorch
are several times slower than float32, and hide other costs). KV cache: 1 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import Figure, MeasurementFailed, figure, vector_extensions

__all__ = [
    "MODEL",
    "REFERENCE",
    "Engine",
    "Variant",
    "Workload",
    "add_arguments",
    "dtype_of",
    "measure",
    "running",
]

ROUNDS = 8
STARTS = 2
"""Number of times that the engines of a mode are started; the rounds are spread over these."""

START_TIMEOUT, ANSWER_TIMEOUT = 600.0, 300.0
VOCABULARY = 32_768
VISIT = 2.0
"""Target duration of a visit of a decoding engine, in seconds."""

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40_960,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Workload:
    """Work of an engine in one visit."""

    name: str
    batch: int
    prompt_tokens: int
    new_tokens: int

    @property
    def counted(self) -> int:
        """Tokens per step: new tokens, or prompt tokens for a prefill."""
        return self.batch * (self.prompt_tokens if self.new_tokens == 1 else 1)

    def prompts(self, seed: int) -> list[list[int]]:
        """Prompts of a round, which differ from earlier rounds because of the prefix cache."""
        pick = random.Random(f"{self.name} {seed}")
        return [
            [pick.randrange(3, VOCABULARY) for _ in range(self.prompt_tokens)]
            for _ in range(self.batch)
        ]

    def fitted(self, seconds: float) -> Workload:
        """Limit the new tokens to a visit, for a step of `seconds`."""
        if self.new_tokens == 1:
            return self
        return dataclasses.replace(self, new_tokens=min(max(round(VISIT / seconds), 4), 64))


WORKLOADS = (
    # With prompts of one token, every step has the shape of a decoding step.
    Workload("decode, batch 1", 1, 1, 4),
    Workload("decode, batch 8", 8, 1, 4),
    Workload("prefill, 256 tokens", 1, 256, 1),
)


@dataclass(frozen=True)
class Variant:
    """A way to run the engine.

    Args:
        variables: environment variables.
        options: further arguments of `vllm.LLM`.
        ours: whether vllm-fl is enabled.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    ours: bool = False


NO_PLUGIN = {"VLLM_PLUGINS": ""}
REFERENCE = {"VLLM_FL_PREFER": "reference"}

VARIANTS = {
    "stock": Variant(NO_PLUGIN),
    "stock-none": Variant(NO_PLUGIN, {"compilation_config": {"custom_ops": ["none"]}}),
    "reference": Variant(REFERENCE, ours=True),
    "shipped": Variant(ours=True),
    "vendor": Variant({"VLLM_FL_PREFER": "vendor"}, ours=True),
    "table": Variant({"VLLM_FL_TABLE": os.environ.get("TABLE", "")}, ours=True),
}
"""`table` uses default settings and the tuning table at the path in the variable TABLE."""

BY_DEFAULT = ("stock", "stock-none", "reference", "shipped")

ON_REAL = ("stock", "shipped")
"""Variants for a model with weights."""

MODES = {
    "eager": tuple(VARIANTS),
    # compiled engines have custom_ops=["none"] by default
    "compiled": tuple(name for name in VARIANTS if name != "stock-none"),
}

BARS = {
    ("eager", "reference", "stock-none"): 0.98,
    ("eager", "reference", "stock"): 0.94,
    ("eager", "shipped", "stock"): 1.0,
    **{("eager", "table", name): 0.98 for name in ("reference", "vendor", "shipped")},
    ("eager", "table", "stock"): 1.0,
    ("compiled", "reference", "stock"): 0.98,
    ("compiled", "shipped", "stock"): 1.0,
}
"""(mode, variant, baseline) -> smallest ratio of tokens per second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options that restrict the engine part."""
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(BY_DEFAULT))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"))
    parser.add_argument("--real", type=Path, help="the folder of a model with weights")


def measure(options: argparse.Namespace) -> list[Figure]:
    """Measure the engines."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        figures = _measured_on(model, "", options.variants, options)
    if options.real is not None:
        figures += _measured_on(options.real, f"{options.real.name}, ", ON_REAL, options)
    return figures


def _measured_on(
    model: Path, title: str, variants: Sequence[str], options: argparse.Namespace
) -> list[Figure]:
    """Measure one model; the names of its figures start with `title`."""
    rounds = -(-(options.rounds or ROUNDS) // STARTS)
    dtype = dtype_of(options)
    figures: list[Figure] = []
    starts = 0
    for mode in options.modes:
        chosen = [name for name in MODES[mode] if name in variants]
        measured = Measured(title + mode, mode)
        for again in range(STARTS):
            order = chosen if again % 2 == 0 else chosen[::-1]
            with contextlib.ExitStack() as stack:
                engines = {
                    name: stack.enter_context(running(name, VARIANTS[name], mode, model, dtype))
                    for name in order
                }
                starts += len(engines)
                measured.add(engines, rounds)
        figures += measured.figures(chosen)
        print(f"  {title}{mode}: {dtype}, {measured.visits}", file=sys.stderr, flush=True)
    print(f"engine starts: {starts}", file=sys.stderr, flush=True)
    return figures


def dtype_of(options: argparse.Namespace) -> str:
    """The dtype of the options, or the one with the fastest products on this CPU."""
    return options.dtype or ("bfloat16" if "avx512f" in vector_extensions() else "float32")


class Measured:
    """Measurements of the engines of one mode; names of figures start with `title`."""

    def __init__(self, title: str, mode: str) -> None:
        self.title, self.mode = title, mode
        self.workloads: list[Workload] = []
        self.speeds: dict[tuple[str, str], list[float]] = {}
        self.idle: list[float] = []
        self.blocks: list[int] = []

    @property
    def visits(self) -> str:
        """Description of the number of new tokens in the visits of decoding engines."""
        return (
            f"visits of {' and '.join(str(w.new_tokens) for w in self.workloads[:-1])} new tokens"
        )

    def add(self, engines: Mapping[str, Engine], rounds: int) -> None:
        """Run the engines one at a time."""
        names = list(engines)
        fitted = warmed_up(engines)
        self.workloads = self.workloads or fitted  # all engines use the visits of the first ones
        self.idle += [engine.idle_share() for engine in engines.values()]
        self.blocks += [int(engine.ready["kv_blocks"]) for engine in engines.values()]
        for number in range(rounds):
            for workload in self.workloads:
                prompts = workload.prompts(number)
                turn = number % len(names)
                for name in (*names[turn:], *names[:turn]):
                    # The system may reclaim memory of an idle process: its first tokens take twice
                    # as long then, and are not timed.
                    engines[name].generate(workload.prompts(number - 1000), 2)
                    seconds = engines[name].generate(prompts, workload.new_tokens)
                    speed = workload.counted / seconds
                    self.speeds.setdefault((name, workload.name), []).append(speed)
            print(f"  {self.title}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)

    def figures(self, names: Sequence[str]) -> list[Figure]:
        """Speeds, their ratios within rounds, KV blocks, and CPU use of idle engines."""
        found = []
        for workload in self.workloads:
            title = f"{self.title}, {workload.name}:"
            speeds = {name: self.speeds[name, workload.name] for name in names}
            found += [figure(f"{title} {n}", "tokens/s", speeds[n]) for n in names]
            for (mode, name, over), bar in BARS.items():
                if mode == self.mode and name in speeds and over in speeds:
                    pairs = zip(speeds[name], speeds[over], strict=True)
                    ratios = [mine / other for mine, other in pairs]
                    found.append(figure(f"{title} {name} / {over}", "", ratios, at_least=bar))
        most, fewest = max(self.blocks), min(self.blocks)
        title = f"{self.title}: KV blocks, fewest / most ({most})"
        found.append(figure(title, "", [fewest / most], at_least=1))
        found.append(figure(f"{self.title}: what an idle engine takes", "cores", self.idle))
        return found


def warmed_up(engines: Mapping[str, Engine]) -> list[Workload]:
    """Run each workload twice in every engine; return workloads with the size of a visit."""
    workloads = []
    for workload in WORKLOADS:
        seconds = []
        for engine in engines.values():
            engine.generate(workload.prompts(-1), workload.new_tokens)
            seconds.append(engine.generate(workload.prompts(-2), workload.new_tokens))
        workloads.append(workload.fitted(min(seconds)))
    return workloads


class Engine:
    """Running engine, idle between jobs."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.ready: dict[str, Any] = self._answer(START_TIMEOUT)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Generate greedily; return the seconds of a step at the fastest quarter."""
        steps = sorted(self.steps(prompts, new_tokens))
        return steps[len(steps) // 4]

    def steps(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        """Generate greedily; return the seconds of each step."""
        assert self.process.stdin is not None
        print(json.dumps({"prompts": prompts, "new_tokens": new_tokens}), file=self.process.stdin)
        self.process.stdin.flush()
        answer = self._answer(ANSWER_TIMEOUT)
        if [len(ids) for ids in answer["tokens"]] != [new_tokens] * len(prompts):
            raise MeasurementFailed(f"engine {self.name} generated another number of tokens")
        steps: list[float] = answer["steps"]
        return steps

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if selector.select(timeout) else ""
        if not line:
            end = self.log.read_text(errors="replace")[-6000:]
            raise MeasurementFailed(
                f"engine {self.name} ended, or did not answer within {timeout:.0f} s:\n{end}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def idle_share(self, seconds: float = 2.0) -> float:
        """Number of cores that the processes of the idle engine keep busy."""
        before = self._cpu_seconds()
        time.sleep(seconds)
        return (self._cpu_seconds() - before) / seconds

    def _cpu_seconds(self) -> float:
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # the process has ended
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid:  # in the engine's session
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(
    name: str, variant: Variant, mode: str, model: Path, dtype: str, compiled: Path | None = None
) -> Iterator[Engine]:
    """Start an engine of this variant; kill all its processes on exit.

    Args:
        name: name of the engine in the output.
        variant: its settings.
        mode: `eager` or `compiled`.
        model: the folder with the model's configuration.
        dtype: dtype of the model.
        compiled: folder of the compile cache. None: an empty one, so that graphs of earlier
            versions are not found.
    """
    request = {
        "model": str(model),
        "ours": variant.ours,
        "options": {
            "dtype": dtype,
            "load_format": "auto" if [*model.glob("*.safetensors")] else "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": mode == "eager",
            "max_model_len": 1024,
            "max_num_seqs": 16,
            **variant.options,
        },
    }
    with tempfile.TemporaryDirectory() as cache:
        log = Path(cache) / "log"
        kept = compiled or Path(cache)
        settings = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
        environment = {
            **settings,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": f"{kept}/vllm",
            "TORCHINDUCTOR_CACHE_DIR": f"{kept}/inductor",
            **variant.variables,
        }
        with log.open("w") as errors:
            process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("engine_server.py")),
                    json.dumps(request),
                ],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        try:
            engine = Engine(f"{mode} {name}", process, log)
            print(f"{_describe(engine)}", file=sys.stderr, flush=True)
            yield engine
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _describe(engine: Engine) -> str:
    """Describe an engine in one line."""
    ready = engine.ready
    plan = ready["report"]["ops"] if ready["report"] else {}
    ops = " ".join(f"{op}={entry['impl']}" for op, entry in plan.items())
    return (
        f"  {engine.name}: ready in {ready['seconds']:.0f} s, {ready['kv_blocks']} KV blocks, "
        f"custom_ops={ready['custom_ops']} {ops}".rstrip()
    )
