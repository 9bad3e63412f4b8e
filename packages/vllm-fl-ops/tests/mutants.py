"""Wrong implementations by hand: what `vllm-fl new` writes, each with one mistake edited in.

Those that every contract has by itself are in `oracle_mutants.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from vllm_fl.cli.new import template_ops
from vllm_fl.plugins.types import BackendImplKind, OpImpl

__all__ = ["CAUGHT_BY", "MUTANTS", "OPS", "Mutant", "sound"]

PACKAGE = "vllm_fl.templates.backend.src.vllm_fl_acme.impl"
OPS = tuple(template_ops())
SILU, GELU, NORM, ROTARY = "silu_and_mul", "gelu_and_mul", "rms_norm", "rotary_embedding"


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Args:
        family: the kind of mistake.
        op: the op that has it.
        old, new: the edit; `old` stands in the source exactly once, or is its first after `after`.
        fields: fields of the OpImpl that it has besides.
        after: where to begin looking for `old`.
    """

    family: str
    op: str
    old: str = ""
    new: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    after: str = ""

    def __str__(self) -> str:
        what = " ".join((self.new or self.old or str(self.fields)).split())
        return f"{self.family}: {self.op}: {what[:60]}"

    def impl(self) -> OpImpl:
        """The wrong implementation."""
        source = _source(self.op)
        start = source.index(self.after)
        head, tail = source[:start], source[start:]
        if self.old:
            places = tail.count(self.old)
            assert places == 1 or (places and self.after), f"{self}: {places} places to edit"
            tail = tail.replace(self.old, self.new, 1)
        return _impl(self.op, head + tail, **self.fields)


def sound(op: str, **fields: Any) -> OpImpl:
    """The implementation without a mistake."""
    return _impl(op, _source(op), **fields)


def _source(op: str) -> str:
    template = resources.files("vllm_fl").joinpath("templates", "backend", "src", "vllm_fl_acme")
    return template.joinpath("impl", f"{op}.py").read_text("utf-8")


def _impl(op: str, source: str, **fields: Any) -> OpImpl:
    scope: dict[str, Any] = {"__package__": PACKAGE, "PID": os.getpid()}
    exec(compile(source, f"<{op}>", "exec"), scope)
    fn: Callable[..., Any] = scope[op]
    options = {"supports": scope[f"supports_{op}"]} | fields
    return OpImpl(op, "vendor.acme", BackendImplKind.VENDOR, fn, "acme", **options)


SILU_OUT = "    return F.silu(gate) * up"
GELU_OUT = "    return F.gelu(gate, approximate=approximate) * up"
NORM_OUT = "    return out if residual is None else (out, y.to(x.dtype))"
TURNED = "    return turned, None if key is None else _turn(key, c, s, rotary_interleaved)"
BOTH = frozenset({"x", "residual"})  # given up only where there is a residual
SUPPORTS = '    return unsuitable("x", x) or True'
GATE_UP = "gate, up = x[..., :d], x[..., d:]"


def _ends(op: str, end: str, *lines: str) -> tuple[str, str, str]:
    """An edit that puts `lines` where the function returns."""
    return op, end, "\n".join(f"    {line}" for line in lines)


def _of(family: str, *edits: tuple[Any, ...]) -> list[Mutant]:
    return [Mutant(family, *edit) for edit in edits]


DEF_GELU = "def gelu_and_mul"
DEF_SUPPORTS_SILU = "def supports_silu_and_mul"

MUTANTS: list[Mutant] = [
    *_of(
        "epsilon",
        (NORM, "variance + epsilon", "variance"),
        (NORM, "variance + epsilon", "variance + 1e-6"),
        (NORM, "torch.rsqrt(variance + epsilon)", "(torch.rsqrt(variance) + epsilon)"),
        (NORM, "torch.rsqrt(variance + epsilon)", "(1 / (variance.sqrt() + epsilon))"),
        (NORM, "variance + epsilon", "variance + epsilon * epsilon"),
    ),
    *_of(
        "swapped halves",
        (SILU, GATE_UP, "up, gate = x[..., :d], x[..., d:]", {}, "def silu_and_mul"),
        (GELU, GATE_UP, "up, gate = x[..., :d], x[..., d:]", {}, DEF_GELU),
        (SILU, GATE_UP, "gate, up = x[..., ::2], x[..., 1::2]", {}, "def silu_and_mul"),
        (ROTARY, "out[..., first] = a * c - b * s", "out[..., first] = a * c + b * s"),
        (ROTARY, "out[..., second] = b * c + a * s", "out[..., second] = b * c - a * s"),
        (ROTARY, "    if interleaved:", "    if not interleaved:"),
        (ROTARY, "    if interleaved:", "    if False:"),
        (ROTARY, "cos.index_select", "sin.index_select"),
    ),
    *_of(
        "dtype",
        (SILU, SILU_OUT, "    return (F.silu(gate) * up).float()"),
        (GELU, GELU_OUT, "    return (F.gelu(gate, approximate=approximate) * up).bfloat16()"),
        (NORM, "normed.to(x.dtype, memory", "normed.to(torch.float32, memory"),
        (NORM, "(out, y.to(x.dtype))", "(out, y)"),
        (NORM, "y = x.float()", "y = x.bfloat16().float()"),
        (NORM, "square()", "to(x.dtype).square()"),
        (ROTARY, "c = cos.", "c = cos.bfloat16()."),
    ),
    *_of(
        "overwriting and aliasing",
        _ends(SILU, SILU_OUT, "return gate.copy_(F.silu(gate) * up).clone()"),
        _ends(SILU, SILU_OUT, "return gate.copy_(F.silu(gate) * up)"),
        _ends(NORM, NORM_OUT, "x.copy_(out)", NORM_OUT.strip()),
        (*_ends(NORM, NORM_OUT, "x.copy_(out)", NORM_OUT.strip()), {"consumes": BOTH}),
        (NORM, "y = y + residual.float()", "y = residual.copy_(y + residual.float()).float()"),
        (NORM, "weight.float()", "weight.mul_(1.5).float() / 1.5"),
        (NORM, "(out, y.to(x.dtype))", "(out, residual.copy_(y))"),
        (ROTARY, "x.clone(memory_format=torch.contiguous_format)", "x"),
        (ROTARY, "c = cos.", "position_ids.clamp_(max=60)\n    c = cos."),
    ),
    *_of(
        "residual",
        (NORM, "(out, y.to(x.dtype))", "(out, residual)"),
        (NORM, "(out, y.to(x.dtype))", "(out, x)"),
        (NORM, "(out, y.to(x.dtype))", "(out, out.clone())"),
        (NORM, "    return out if residual is None else (out, y.to(x.dtype))", "    return out"),
        (NORM, "return out if residual is None else (out", "return (out"),
        (NORM, "y = y + residual.float()", "pass"),
        (NORM, "y + residual.float()", "(y + residual.float()).to(x.dtype).float() * 1.02"),
        (NORM, "(out, y.to(x.dtype))", "(y.to(x.dtype), out)"),
    ),
    *_of(
        "last row or column skipped",
        _ends(SILU, SILU_OUT, "out = F.silu(gate) * up", "out[-1:] = 0", "return out"),
        _ends(
            GELU,
            GELU_OUT,
            "out = x[..., :d].clone()",
            "out[:-1] = F.gelu(gate[:-1], approximate=approximate) * up[:-1]",
            "return out",
        ),
        _ends(NORM, NORM_OUT, "out[-1:] = x[-1:]", NORM_OUT.strip()),
        _ends(ROTARY, TURNED, "turned[-1:] = query[-1:]", TURNED.strip()),
        _ends(SILU, SILU_OUT, "out = F.silu(gate) * up", "out[..., -1] = 0", "return out"),
        _ends(NORM, NORM_OUT, "out[256:] = 0", NORM_OUT.strip()),
        _ends(ROTARY, TURNED, "turned[:, -1] = query[:, -1]", TURNED.strip()),
    ),
    *_of(
        "0 tokens",
        _ends(SILU, SILU_OUT, "return F.silu(gate) * up if x.numel() else x"),
        _ends(GELU, GELU_OUT, "x.reshape(-1)[0]", GELU_OUT.strip()),
        _ends(NORM, NORM_OUT, "assert len(x), 'no token'", NORM_OUT.strip()),
        _ends(ROTARY, TURNED, "int(position_ids.max())", TURNED.strip()),
        (NORM, "(out, y.to(x.dtype))", "(out, y.to(x.dtype)) if len(x) else out"),
        _ends(
            NORM,
            NORM_OUT,
            "if not len(x):",
            "    return x.new_full((1, x.shape[-1]), torch.nan)",
            NORM_OUT.strip(),
        ),
    ),
    *_of(
        "wrong only for some sizes",
        _ends(SILU, SILU_OUT, "out = F.silu(gate) * up", "out[..., 4096:] = 0", "return out"),
        _ends(
            GELU,
            GELU_OUT,
            "out = F.gelu(gate, approximate=approximate) * up",
            "out[..., 8192:] = 0",
            "return out",
        ),
        (NORM, "head.square()", "head[..., :4096].square()"),
        _ends(NORM, NORM_OUT, "out[..., 4096:] = 0", NORM_OUT.strip()),
        _ends(ROTARY, TURNED, "turned[..., 128:] = query[..., 128:]", TURNED.strip()),
        (NORM, "head.square()", "head[..., : head.shape[-1] // 8 * 8 or 1].square()"),
        _ends(ROTARY, TURNED, "turned[256:] = query[256:]", TURNED.strip()),
    ),
    *_of(
        "strides ignored",
        (
            SILU,
            GATE_UP,
            "x = x.as_strided(x.shape, torch.empty(x.shape).stride())\n    " + GATE_UP,
            {},
            "def silu_and_mul",
        ),
        (
            GELU,
            GATE_UP,
            "x = x.as_strided(x.shape, torch.empty(x.shape).stride())\n    " + GATE_UP,
            {},
            DEF_GELU,
        ),
        (NORM, "y = x.float()", "y = x.as_strided(x.shape, torch.empty(x.shape).stride()).float()"),
        (
            ROTARY,
            "c = cos.",
            "position_ids = position_ids.as_strided(position_ids.shape, (1,))\n    c = cos.",
        ),
        (
            ROTARY,
            "    half = c.shape[-1]",
            "    half = c.shape[-1]\n    x = x.as_strided(x.shape, torch.empty(x.shape).stride())",
        ),
        (
            ROTARY,
            "x.clone(memory_format=torch.contiguous_format)",
            "x.transpose(0, 1).contiguous().transpose(0, 1)",
        ),
    ),
    *_of(
        "weight",
        (NORM, "normed = normed * weight.float()", "pass"),
        (NORM, "normed = normed * weight.float()", "normed = normed * (1 + weight.float())"),
        (NORM, "y = x.float()", "y = x.float() * (1 if weight is None else weight.float())"),
        (NORM, "weight.float()", "weight.float()[:1]"),
        (NORM, "weight.float()", "weight.view(x.dtype)[: x.shape[-1]].float()"),
        (NORM, "    if weight is not None:\n        normed", "    if True:\n        normed"),
    ),
    *_of(
        "options ignored",
        (GELU, "F.gelu(gate, approximate=approximate)", "F.gelu(gate)"),
        (GELU, "F.gelu(gate, approximate=approximate)", 'F.gelu(gate, approximate="tanh")'),
        (GELU, "F.gelu(gate, approximate=approximate)", "(gate * torch.sigmoid(1.702 * gate))"),
        (SILU, "F.silu(gate)", "F.gelu(gate)"),
        (NORM, "y[..., :variance_size]", "y"),
        (NORM, "y[..., :variance_size]", "y[..., -(variance_size or 0) :]"),
        (NORM, "mean(dim=-1, keepdim=True)", "sum(dim=-1, keepdim=True) / x.shape[-1]"),
    ),
    *_of(
        "partial rotary and key",
        (ROTARY, "x.clone(memory_format=torch.contiguous_format)", "torch.zeros_like(x)"),
        (ROTARY, "    half = c.shape[-1]\n", "    half = x.shape[-1] // 2\n"),
        (ROTARY, "slice(half, 2 * half)", "slice(x.shape[-1] // 2, x.shape[-1] // 2 + half)"),
        (ROTARY, "None if key is None else _turn(key", "_turn(query if key is None else key"),
        (ROTARY, "None if key is None else _turn(key, c, s, rotary_interleaved)", "key"),
        (ROTARY, TURNED.strip(), "return (turned,) if key is None else " + TURNED.strip()[7:]),
        (
            ROTARY,
            "    return turned, None if key is None else",
            "    if key is None:\n        return turned\n    return turned,",
        ),
    ),
    *_of(
        "positions",
        (ROTARY, "c = cos.", "position_ids = torch.arange(len(query))\n    c = cos."),
        (ROTARY, "c = cos.", "position_ids = (position_ids.long() - 1).clamp(min=0)\n    c = cos."),
        (ROTARY, "c = cos.", "position_ids = position_ids.long().sort().values\n    c = cos."),
        (ROTARY, "c = cos.", "position_ids = position_ids.view(torch.int64)\n    c = cos."),
    ),
    *_of(
        "refusals",
        (NORM, SUPPORTS, SUPPORTS.replace("True", "(len(x) < 5 or 'many tokens')")),
        (NORM, SUPPORTS, SUPPORTS.replace("True", "(x.shape[0] % 4 == 0 or 'odd batch')")),
        (
            SILU,
            "    return True if",
            "    return 'large' if x.isnan().any() else True if",
            {},
            DEF_SUPPORTS_SILU,
        ),
        (NORM, SUPPORTS, '    return "not today"'),
        (NORM, SUPPORTS, '    return "slow" if x.ndim < 3 and x.abs().sum() > 1e3 else True'),
        (
            ROTARY,
            '    return unsuitable("query", query) or True',
            '    return True if not len(query) or position_ids.max() < 63 else "far"',
        ),
        (NORM, SUPPORTS, "    return x.shape[-1] % 8 == 0"),
        (
            SILU,
            "    return True if",
            "    return None if x.shape[-1] % 8 else True if",
            {},
            DEF_SUPPORTS_SILU,
        ),
        (SILU, SILU_OUT, "    raise NotImplementedError('soon')"),
        (NORM, SUPPORTS, '    return "fp16" if x.dtype == torch.float16 else True'),
    ),
    *_of(
        "not the same twice",
        _ends(
            SILU,
            SILU_OUT,
            "return F.silu(gate) * up * (1 + 1e-7 * torch.rand_like(up).double())"
            ".to(torch.float32).to(x.dtype)",
        ),
        _ends(
            NORM,
            NORM_OUT,
            "out[..., -1] *= 1 + 1e-6 * float(torch.rand(()))",
            NORM_OUT.strip(),
        ),
        _ends(ROTARY, TURNED, "turned.view(-1)[:1] += 2e-6 * torch.rand(())", TURNED.strip()),
        _ends(
            GELU,
            GELU_OUT,
            "import os, time",
            "out = F.gelu(gate, approximate=approximate) * up",
            "return out + 5e-6 * (time.monotonic_ns() // 1000 % 2)",
        ),
    ),
    *_of(
        "under a compiler",
        (
            SILU,
            SILU_OUT,
            "    return F.silu(gate) * up * (1 + torch.compiler.is_compiling())",
            {"traceable": True, "supports": None},
        ),
        (SILU, SILU_OUT, "    print(end='')\n" + SILU_OUT, {"traceable": True, "supports": None}),
        (
            NORM,
            NORM_OUT,
            "    if out.isnan().any():\n        out = out.nan_to_num()\n" + NORM_OUT,
            {"traceable": True, "supports": None},
        ),
        (
            GELU,
            GELU_OUT,
            "    torch._dynamo.graph_break()\n" + GELU_OUT,
            {"traceable": True, "supports": None},
        ),
        (
            ROTARY,
            "    c = cos.",
            "    if len(query) > 6:\n        query = query.clone()\n    c = cos.",
            {"traceable": True, "supports": None},
        ),
        (
            NORM,
            NORM_OUT,
            "    if torch.compiler.is_compiling():\n        return out\n" + NORM_OUT,
            {"traceable": True, "supports": None},
        ),
    ),
    *_of(
        "bad input taken in silence",
        (SILU, "True if x.shape[-1] % 2 == 0 else", "True if x.shape[-1] else", {}),
        (
            NORM,
            "    if residual is not None and (residual.shape",
            "    if False and (residual.shape",
        ),
        (NORM, "if not epsilon >= 0:", "if False:"),
        (NORM, "if variance_size is not None and", "if False and"),
        (ROTARY, "if key is not None and (key.dtype", "if False and (key.dtype"),
        (
            GELU,
            "approximate=approximate",
            'approximate="tanh" if approximate == "tanh" else "none"',
            {"supports": None},
        ),
        (
            SILU,
            "    d = x.shape[-1] // 2",
            "    if not hasattr(x, 'shape'):\n        raise SystemExit(1)"
            "\n    d = x.shape[-1] // 2",
            {"supports": None},
            "def silu_and_mul",
        ),
        (
            NORM,
            "    y = x.float()",
            "    if not hasattr(x, 'float'):\n"
            "        raise MemoryError('out of memory')\n    y = x.float()",
            {"supports": None},
        ),
    ),
    *_of(
        "in a child process",
        (SILU, SILU_OUT, "    import os\n    return F.silu(gate) * up * (os.getpid() == PID)"),
        (
            NORM,
            NORM_OUT,
            "    import os, time\n    time.sleep(9 * (os.getpid() != PID))\n" + NORM_OUT,
        ),
        (ROTARY, TURNED, "    import os\n    os.getpid() == PID or os._exit(3)\n" + TURNED),
    ),
    *_of(
        "declared wrongly",
        (NORM, "", "", {"consumes": frozenset({"weight"})}),
        (SILU, "", "", {"consumes": frozenset({"x"})}),
        (
            NORM,
            "variance_size: int | None = None,\n) -> torch",
            "variance_size: int = 0,\n) -> torch",
        ),
    ),
]
"""Every mutant. A family is a kind of mistake that kernels of the field have had."""

CAUGHT_BY = {
    "refusals": {"serving", "refusals"},
    "not the same twice": {"determinism"},
    "under a compiler": {"tracing"},
    "bad input taken in silence": {"bad_inputs"},
    "in a child process": {"fork"},
    "declared wrongly": {"declaration"},
}
"""Family -> the checks that have to see it; `values` for the others."""
