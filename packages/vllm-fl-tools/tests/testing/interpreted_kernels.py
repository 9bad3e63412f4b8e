"""Small Triton kernels that need the interpreter's patches, compared with torch.

    python interpreted_kernels.py

Prints a JSON line per case: `case` and `problem`, which is "" if the result is correct.
"""

from __future__ import annotations

import json

import torch

from vllm_fl_tools.testing.triton import interpreted, to_compile

interpreted(cuda=True)
interpreted()

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.language.extra.cuda.libdevice import tanh as cuda_tanh  # noqa: E402

N = 64


@triton.jit
def plain(x, out, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count), mask=at < count)


@triton.jit(do_not_specialize=["count"])
def left_alone(x, out, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count), mask=at < count)


@triton.jit
def rounding(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(tl.bfloat16))


@triton.jit
def widening(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


@triton.jit
def logic(x, y, out, SIZE: tl.constexpr, BOTH: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(x + at), tl.load(y + at)
    if BOTH and SIZE > 1:
        chosen = a > 0 and b > 0
    else:
        chosen = a > 0 or (b > 0 and a < -0.5)
    tl.store(out + at, tl.where(chosen, a, b))


@triton.jit
def arithmetic(x, y, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a + b)
    tl.store(out + SIZE + at, a - b)
    tl.store(out + 2 * SIZE + at, a * b)
    tl.store(out + 3 * SIZE + at, a * 0.3 + 1.0)
    tl.store(out + 4 * SIZE + at, tl.where((a < b) & (a > -1.0), a, -b))
    tl.store(out + 5 * SIZE + at, tl.fma(a, b, a))
    tl.store(out + 6 * SIZE + at, tl.abs(a))


@triton.jit
def scaled(x, out, scale, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) * scale)
    tl.store(out + SIZE + at, tl.load(x + at) * scale.to(x.dtype.element_ty))


@triton.jit
def products(x, y, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out + at, tl.dot(tl.load(x + at), tl.load(y + at)))


@triton.jit
def functions(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a = tl.load(x + at)
    value = libdevice.erf(a) + cuda_tanh(a) + libdevice.pow(a * a, 1.5)
    tl.store(out + at, value + libdevice.rsqrt(tl.sum(a * a, 0) + 1.0))


@triton.jit
def missing(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, libdevice.cyl_bessel_i0(tl.load(x + at)))


def none_smaller(configs, named, **_):
    return [config for config in configs if config.kwargs["BLOCK"] >= 16]


def cleared(named):
    named["out"].zero_()


@triton.autotune(
    [
        triton.Config({"BLOCK": 4}, num_warps=1),
        triton.Config({"BLOCK": 16}, num_warps=2, num_stages=3, pre_hook=cleared),
        triton.Config({"BLOCK": 32}, num_warps=4),
    ],
    key=["size"],
    prune_configs_by={"early_config_prune": none_smaller},
)
@triton.heuristics({"EVEN": lambda args: args["size"] % args["BLOCK"] == 0})
@triton.jit
def tuned(x, out, size, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + at, mask=inside) + tl.load(out + at, mask=inside)
    tl.store(out + at, value + BLOCK + (100 if EVEN else 0), mask=inside)


def same(got: torch.Tensor, want: torch.Tensor, tolerance: float = 0.0) -> str:
    off = (got.double() - want.double()).abs()
    return (
        "" if bool((off <= tolerance * (1 + want.double().abs())).all()) else f"off by {off.max()}"
    )


def case_rounding() -> str:
    x = torch.randn(N)
    x[:2] = torch.tensor([float("nan"), float("inf")])
    out = torch.empty(N, dtype=torch.bfloat16)
    rounding[(1,)](x, out, SIZE=N)
    want = x.to(torch.bfloat16)
    return "" if torch.equal(out[1:], want[1:]) and out[0].isnan() else "other bits"


def case_eight_bits() -> str:
    """All 256 numbers, including two NaN."""
    x = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for dtype in (torch.float16, torch.float32):
        out = torch.empty(256, dtype=dtype)
        widening[(1,)](x, out, SIZE=256)
        if not torch.equal(out.nan_to_num(1000.0), x.to(dtype).nan_to_num(1000.0)):
            return f"other numbers in {dtype}"
    return ""


def case_and() -> str:
    x, y, out = torch.randn(N), torch.randn(N), torch.empty(N)
    logic[(1,)](x, y, out, SIZE=N, BOTH=True)
    return same(out, torch.where((x > 0) & (y > 0), x, y))


def case_or() -> str:
    x, y, out = torch.randn(N), torch.randn(N), torch.empty(N)
    logic[(1,)](x, y, out, SIZE=N, BOTH=False)
    return same(out, torch.where((x > 0) | ((y > 0) & (x < -0.5)), x, y))


def case_bfloat16() -> str:
    x, y = (torch.randn(N, dtype=torch.bfloat16) for _ in "xy")
    out = torch.empty(7, N, dtype=torch.bfloat16)
    arithmetic[(1,)](x, y, out, SIZE=N)
    chosen = torch.where((x < y) & (x > -1.0), x, -y)
    fused = (x.float() * y.float() + x.float()).bfloat16()
    scale = torch.tensor(0.3).bfloat16()
    want = torch.stack((x + y, x - y, x * y, x * scale + 1.0, chosen, fused, x.abs()))
    return same(out, want)


def case_float_argument() -> str:
    x, out = torch.randn(N).half(), torch.empty(2, N)
    scaled[(1,)](x, out, 0.3, SIZE=N)
    return same(out, torch.stack((x.float() * 0.3, (x * torch.tensor(0.3).half()).float())), 1e-7)


def case_dot() -> str:
    x, y = (torch.randn(16, 16, dtype=torch.bfloat16) for _ in "xy")
    out = torch.empty(16, 16)
    products[(1,)](x, y, out, SIZE=16)
    return same(out, x.double() @ y.double(), 1e-5)


def case_libdevice() -> str:
    x, out = torch.randn(N), torch.empty(N)
    functions[(1,)](x, out, SIZE=N)
    d = x.double()
    want = d.erf() + d.tanh() + (d * d) ** 1.5 + ((d * d).sum() + 1).rsqrt()
    return same(out, want, 1e-5)


def case_missing() -> str:
    try:
        missing[(1,)](torch.randn(N), torch.empty(N), SIZE=N)
    except Exception as error:
        return "" if "lacks libdevice's 'cyl_bessel_i0'" in str(error) else str(error)
    return "no error"


def case_autotune() -> str:
    x, out = torch.randn(40), torch.full((40,), float("nan"))
    tuned[lambda meta: (triton.cdiv(40, meta["BLOCK"]),)](x, out, 40)
    return same(out, x + 16, 1e-6) or ("" if tuned.__name__ == "tuned" else tuned.__name__)


def case_wrapped() -> str:
    """A kernel in code that a compiler may trace runs at once."""
    x, out = torch.randn(33), torch.zeros(33)
    torch.library.wrap_triton(plain)[(1,)](x, out, 33, BLOCK=64, num_warps=4)
    return same(out, x)


def case_function() -> str:
    if not isinstance(rounding, triton.JITFunction) or isinstance(rounding, int):
        return "no JITFunction"
    if not rounding.src.startswith("def rounding(x, out"):
        return rounding.src
    same_key = rounding.cache_key == logic.cache_key
    return "one key for two kernels" if same_key else ""


def case_cuda() -> str:
    with torch.cuda.device(0):
        capability = torch.cuda.get_device_capability()
    return "" if capability == (8, 0) and torch.cuda.device_count() == 1 else str(capability)


def case_to_compile() -> str:
    """Nothing runs, and each launch needs as many new compilations as its number says."""
    x, out = torch.ones(80), torch.zeros(80)
    launches = [
        ((x, out, 33), 1),
        ((x, out, 35), 0),  # the same kinds of numbers
        ((x, out, 32), 1),  # divisible by 16
        ((x, out, 64), 0),
        ((x, out, 1), 1),
        ((x[1:], out, 33), 1),  # the address is not divisible by 16
        ((x[3:], out, 33), 0),
        ((x[4:], out, 33), 0),
        ((x.double(), out, 33), 1),
    ]
    with to_compile(runs=False) as found:
        for number, (args, more) in enumerate(launches):
            before = len(found)
            plain[(1,)](*args, BLOCK=64)
            if len(found) - before != more:
                return f"launch {number}: {len(found) - before} to compile, not {more}"
        before = len(found)
        plain[(1,)](x, out, 33, BLOCK=128)
        plain[(1,)](x, out, 33, BLOCK=128, num_warps=8)
        left_alone[(1,)](x, out, 33, BLOCK=64)
        left_alone[(1,)](x, out, 32, BLOCK=64)
        if len(found) - before != 3:
            return f"a constant, an option, another kernel: {len(found) - before}"
        if bool(out.any()):
            return "a kernel ran"
    plain[(1,)](x, out, 33, BLOCK=64)
    return "" if float(out.sum()) == 33.0 else "no kernel runs afterwards"


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in [name for name in globals() if name.startswith("case_")]:
        try:
            problem = globals()[name]()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps({"case": name.removeprefix("case_"), "problem": problem}))
