'''The conformance kit: tests that an implementation must pass before use.

**Test a backend.** `pip install vllm-fl-tools[testing]`, and write one file::

    """The backend keeps every contract."""

    from vllm_fl_tools.testing import OpConformance


    class TestMyOps(OpConformance):
        backend = "vendor.acme"

`python -m pytest` then runs, for every op that the installed backend provides and every dtype of
its contract:

========================  =========================================================================
`test_availability`       it is available; otherwise all other tests are skipped with its reason
`test_declaration`        its parameters and consumed arguments match the contract
`test_values`             each sample is within its tolerance of the float64 reference result;
                          undeclared arguments are unchanged; results share only permitted memory
`test_bad_inputs`         the error of `call_op` names the invalid argument, and disables nothing;
                          integer weights are invalid if the contract forbids them
`test_call_op`            `call_op` changes no argument except caches
`test_large_pools`        entries of caches, states and expert weights beyond 2**31 elements are
                          found
`test_determinism`        equal inputs give bitwise identical results
`test_refusals`           `supports` returns True or a reason, independently of values and batch
                          size, and rejects a first argument on another device
`test_serving`            it supports a call of a served model, in at least one dtype
`test_preflight`          it passes the verification at engine startup
`test_families`           calls of at least six families of public models, if as many have the op,
                          with few tokens, in the models' dtype (see `testing.families`)
`test_tracing`            it compiles as one graph for every batch size, with correct results
`test_opcheck`            as an operator of torch.library it matches its schema and fake kernel
`test_fork`, `test_spawn` a child process gets identical bits, before its deadline
`test_engine`             vLLM serves a tiny model with it (only with `-m engine`)
`test_quantised_layers`   classes of `linear_kernels` and `expert_kernels` compute made weights
                          correctly, in formats of compressed-tensors; linear layers also after the
                          weights are loaded again
`test_exceptions`         every entry of xfails.toml matches a test
========================  =========================================================================

Unsupported calls and dtypes are skipped, and pytest prints the reason. pytest counts a run with
only skipped tests as a success. Therefore, on a machine with the device, use `python -m pytest
--require-available`, which fails if an implementation is not available. `test_engine` starts one
engine for all ops, and stops all processes of vLLM. `vllm-fl bisect --startup` finds the op at
fault.

**Exceptions are data.** List known deviations of a backend, with reasons, in `xfails.toml` in the
directory of the test file (`Xfail` has the keys). A test that passes despite an entry fails, and so
does an entry without a test. This keeps the file up to date.

**Sizes and time.** The tests use the calls of a model, set by the class attribute `sizes`, a
`ModelSizes` (by default Qwen3-0.6B, with additional calls of few tokens from public models that
have the op). Set smaller sizes if kernels are interpreted, or the sizes of your model if kernels
are made for it. `deadline` limits the seconds of a child process for one op, by default 120.
Increase it if kernels compile slowly.

**Without pytest.** `failures(impl)` runs the same checks on one implementation without pytest.

**Triton without a GPU.** `vllm_fl_tools.testing.triton` runs your kernels in Triton's interpreter.

The contracts define tolerances, samples and bad inputs: see `vllm_fl.contracts`.
'''

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_fl.contracts import ModelSizes

from .cases import CHECKS, Case, Failure, failures
from .exceptions import Xfail

if TYPE_CHECKING:
    from .suite import OpConformance

__all__ = ["CHECKS", "Case", "Failure", "ModelSizes", "OpConformance", "Xfail", "failures"]


def __getattr__(name: str) -> Any:
    if name != "OpConformance":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .suite import OpConformance  # needs pytest, which `failures` does not
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise ImportError(
            "OpConformance needs pytest: pip install 'vllm-fl-tools[testing]'", name="pytest"
        ) from error
    return OpConformance
