'''The conformance kit: what an implementation has to show before a model is served with it.

**Test a backend.** `pip install vllm-fl-core[testing]`, and write one file, complete::

    """The backend keeps every contract."""

    from vllm_fl_tools.testing import OpConformance


    class TestMyOps(OpConformance):
        backend = "vendor.acme"

`python -m pytest` then runs, for every op that the installed backend brings and every dtype of its
contract:

========================  =========================================================================
`test_availability`       it runs here; where it does not, everything is skipped with its reason
`test_declaration`        parameters, and what it consumes, are the contract's
`test_values`             each sample within its tolerance of the fp64 oracle; nothing overwritten
                          that is not declared; results share no memory with what they must not
`test_bad_inputs`         `call_op` names the wrong argument, and demotes nothing; a weight of
                          integers is one, where the contract forbids it
`test_call_op`            `call_op` changes no argument except caches
`test_determinism`        the same inputs give the same bits
`test_refusals`           `supports` gives True or a reason, looks at neither values nor batch, and
                          refuses a first argument on another device
`test_serving`            it takes some call of a served model; a dtype may be refused, but not all
`test_preflight`          an engine that starts with it would keep it
`test_families`           calls of public models of at least six families, where as many have the
                          op, with few tokens, in the models' dtype (see `testing.families`)
`test_tracing`            it compiles whole, once for every batch size, with the right numbers
`test_opcheck`            as an operator of torch.library it keeps its schema and its fake
`test_fork`, `test_spawn` a child process gives the same bits, and gives them in time
`test_engine`             vLLM serves a tiny model with it (only with `-m engine`)
`test_exceptions`         every entry of xfails.toml still names a test
========================  =========================================================================

What the implementation refuses with a reason, a call or a dtype, is skipped, and pytest prints the
reason. `python -m pytest --require-available` fails where an implementation is not available, for a
machine that has the device: nothing but skipped tests is a success to pytest. `test_engine` starts
one engine for all ops; only where that fails, one more for each op, so that the op at fault is
named. Whatever happens, none of vLLM's processes is left behind.

**Exceptions are data.** What a backend knowingly does otherwise stands in `xfails.toml`, beside the
test file, with its reason (`Xfail` has the keys). A test that passes against its entry fails, and
so does an entry that names no test: the file never says more than is true.

**Sizes and time.** The class attribute `sizes`, a `ModelSizes`, is the served model whose calls are
tried (where it says nothing Qwen3-0.6B's, and beside it those of the public models that have the
op, each with few tokens): take smaller ones where kernels are interpreted, those
of your model where a kernel is made for them. `deadline` is the time in seconds that a child
process may take for one op, 120 where it says nothing: longer where kernels are compiled slowly.

**Without pytest.** `failures(impl)` runs the same checks on one implementation, and imports no
pytest.

**Triton without a GPU.** `vllm_fl_tools.testing.triton` has Triton's interpreter run your kernels.

Tolerances, samples and bad inputs are the contracts' own: see `vllm_fl.contracts`.
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
        from .suite import OpConformance  # needs pytest, which `failures` does without
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise ImportError(
            "OpConformance needs pytest: pip install 'vllm-fl-core[testing]'", name="pytest"
        ) from error
    return OpConformance
