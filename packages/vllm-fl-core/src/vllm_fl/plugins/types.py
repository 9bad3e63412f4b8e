"""The types by which plugins describe implementations to core. Does not import torch or vllm."""

from __future__ import annotations

import enum
import inspect
import keyword
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

from ..contracts.call_checks import Rule
from .answers import Availability, answered, check_path, older_probe, parameters_of
from .breadcrumb import noting

R = TypeVar("R")


class BackendImplKind(enum.StrEnum):
    """The kind of an implementation. In settings, the value is the selector of the kind."""

    DEFAULT = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"


class BackendPriority(enum.IntEnum):
    """Priority within one kind; higher values come first. The gaps of 50 leave room for others."""

    DEFAULT = 150
    VENDOR = 100
    REFERENCE = 50


class _Impl:
    op_name: str
    impl_id: str
    kind: BackendImplKind
    vendor: str | None
    priority: int | None
    available: Callable[[], Availability] | None

    @property
    def vendors(self) -> frozenset[str]:
        """Its vendor, also as spelled in its id; empty for other kinds."""
        own = self.impl_id.partition(".")[2]
        return frozenset((self.vendor, own)) if self.vendor else frozenset()

    def availability(self) -> Availability:
        """Return True, or why it cannot run here. The result is cached per process."""
        # A child process evaluates it again, because its device may differ.
        cached: tuple[int, Availability] | None = self.__dict__.get("_availability")
        if cached is not None and cached[0] == os.getpid():
            return cached[1]
        verdict = self._probe()
        object.__setattr__(self, "_availability", (os.getpid(), verdict))
        return verdict

    def is_available(self) -> bool:
        return self.availability() is True

    def _probe(self) -> Availability:
        fn = getattr(self, "fn", None)
        if self.available is None and inspect.isfunction(fn) and not hasattr(fn, "_is_available"):
            return True

        def ask() -> Availability:
            available = self.available or older_probe(fn)
            return True if available is None else available()

        note = f"the availability check of {self.op_name}={self.impl_id}"
        with noting(note):
            return answered("its availability check", ask)

    def _complete_id(self) -> None:
        """Set an omitted id of a VENDOR."""
        if self.impl_id == "" and self.kind is BackendImplKind.VENDOR:
            object.__setattr__(self, "impl_id", f"vendor.{self.vendor}")

    def _check(self, who: str) -> None:
        for name in ("available", "supports", "choices", "disable"):
            value = getattr(self, name, None)
            if value is not None and not callable(value):
                raise TypeError(f"{who}: {name} must be callable, got {value!r}")
        if not isinstance(self.kind, BackendImplKind):
            raise TypeError(f"{who}: kind must be a BackendImplKind, got {self.kind!r}")
        if not isinstance(self.impl_id, str) or not self.impl_id:
            raise ValueError(f"{who}: impl_id must be a non-empty string such as 'default.flagos'")
        if self.kind is BackendImplKind.VENDOR:
            if not self.vendor:
                raise ValueError(f"{who}: kind VENDOR needs vendor='<name>'")
            wanted = f"vendor.{self.vendor}"
            if self.impl_id.casefold() != wanted.casefold():
                raise ValueError(f"{who}: a vendor's impl_id must be {wanted!r}")
            if self.impl_id != wanted:
                instead = self.impl_id.partition(".")[2]
                text = (
                    f"{who}: vendor={self.vendor!r} differs from the id in case; write {instead!r}"
                )
                warnings.warn(text, DeprecationWarning, stacklevel=4)
        elif self.vendor is not None:
            raise ValueError(f"{who}: vendor={self.vendor!r} is for kind VENDOR only")
        if self.priority is None:
            object.__setattr__(self, "priority", int(BackendPriority[self.kind.name]))
        elif not isinstance(self.priority, int):
            raise TypeError(f"{who}: priority must be an int, got {self.priority!r}")


@dataclass(frozen=True, eq=False)
class OpImpl(_Impl):
    """One backend's implementation of one op.

    Args:
        op_name: the name of the op in its contract (`rms_norm`).
        impl_id: unique within the op: `default.flagos`, `reference.torch`, `vendor.<vendor>`.
        kind: its kind.
        fn: the implementation, with the contract's parameters: names, order and defaults. A first
            parameter `self` or `obj` means that it needs a layer.
        vendor: the vendor's name; required for kind VENDOR and rejected for others. A name that
            differs from the id only in case is deprecated, but settings may use both.
        priority: order within a kind, higher first; None: the kind's `BackendPriority`.
        available: () -> True, or the reason why it cannot run on this machine. Called once per
            process. It may look for a device, but should not import a large library.
        supports: the contract's parameters -> True, or the reason why it does not support them. It
            may depend on dtypes, ranks and layouts, and on whether an argument is None. It must not
            depend on values or on the batch size.
        takes: rules for supported calls, in addition to the contract; excludes `supports`. A rule
            is an expression such as `epsilon >= 0`, or a function of some arguments
            (`contracts/call_checks.py`). The rules are compiled when the implementation is
            registered. If `takes` is empty and `fn` is traceable, an unsupported call raises
            NotImplementedError.
        consumes: parameters that `fn` may overwrite if the variant of the call writes results to
            them (`OpSpec.consumed`). `fn` still returns its results.
        traceable: True lets the compiler trace into `fn`; False makes it one opaque op.
        choices: () -> the choices that `fn` has made by timing so far, such as tile sizes: a
            mapping of JSON-able values. Called for each report, from any thread. It must not use
            the device. The ranks compare the choices after the KV cache is allocated (FL503).
        supported_dtypes, min_arch: ignored: use `supports` and `available`.

    Raises:
        ValueError: a VENDOR has no vendor or an id that is not `vendor.<vendor>`; a name is not an
            identifier; both `takes` and `supports` are set, or either although `fn` needs a layer.
        TypeError: a field has a wrong type.
    """

    op_name: str
    impl_id: str
    kind: BackendImplKind
    fn: Callable[..., Any]
    vendor: str | None = None
    priority: int | None = None
    available: Callable[[], Availability] | None = field(default=None, kw_only=True)
    supports: Callable[..., Availability] | None = field(default=None, kw_only=True)
    takes: Sequence[Rule] | None = field(default=None, kw_only=True)
    consumes: frozenset[str] = field(default=frozenset(), kw_only=True)
    traceable: bool = field(default=False, kw_only=True)
    choices: Callable[[], Mapping[str, Any]] | None = field(default=None, kw_only=True)
    supported_dtypes: object = field(default=None, kw_only=True)
    min_arch: object = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        who = f"OpImpl({self.op_name!r}, {self.impl_id!r})"
        if not isinstance(self.op_name, str) or not _is_name(self.op_name, op=True):
            raise ValueError(f"{who}: op_name must be an identifier such as 'rms_norm'")
        if not callable(self.fn):
            raise TypeError(f"{who}: fn must be callable, got {self.fn!r}")
        self._check(who)
        if self.takes is not None and self.supports is not None:
            raise ValueError(f"{who}: takes and supports exclude each other")
        if self.needs_layer and (self.takes is not None or self.supports is not None):
            raise ValueError(f"{who}: with a layer, takes and supports would have no effect")
        if isinstance(self.consumes, str) or isinstance(self.takes, str):
            raise TypeError(f"{who}: consumes and takes must be collections, got a string")
        object.__setattr__(self, "consumes", frozenset(self.consumes))

    @cached_property  # read for every unsupported call
    def needs_layer(self) -> bool:
        """Whether the first parameter of `fn` is the calling layer (`self` or `obj`)."""
        parameters = parameters_of(self.fn)
        return bool(parameters and parameters[0].name in ("self", "obj"))


@dataclass(frozen=True)
class AttentionRequest:
    """vLLM's requirements for an attention backend, for `AttentionImpl.supports`.

    Args:
        head_size: features of one head.
        dtype: the model's dtype, as torch prints it (`torch.bfloat16`).
        kv_cache_dtype: `auto`, `fp8`, …
        block_size: tokens in one KV-cache block, or None if undecided.
        use_mla, has_sink, use_sparse: as in vLLM's selector; False if a vLLM release lacks the
            field.
        num_heads: query heads of one rank, or None.
        extras: further fields of newer vLLM releases. Read them with `.get`, because older releases
            lack them. A request for the whole model has `num_kv_heads` of a rank, and `is_hybrid`,
            which is True if other layers keep states. vLLM then stores pages of two layouts in one
            memory.
    """

    head_size: int
    dtype: Any
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    use_mla: bool = False
    has_sink: bool = False
    use_sparse: bool = False
    num_heads: int | None = None
    extras: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, eq=False)
class _ClassImpl(_Impl, Generic[R]):
    impl_id: str
    class_path: str | Callable[[R], str]
    kind: BackendImplKind
    vendor: str | None = None
    priority: int | None = None
    available: Callable[[], Availability] | None = field(default=None, kw_only=True)
    supports: Callable[[R], Availability] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        who = f"{type(self).__name__}({self.impl_id!r})"
        if not callable(self.class_path):
            check_path(who, "class_path", self.class_path)
        self._check(who)


@dataclass(frozen=True, eq=False)
class AttentionImpl(_ClassImpl[AttentionRequest]):
    """An attention backend, by the path of its class, which is imported when it is chosen.

    Args:
        impl_id: as for `OpImpl`.
        class_path: `module.Class`, a vLLM `AttentionBackend` subclass; or AttentionRequest -> such
            a path, if one backend has several classes (MLA, sparse). vLLM must know the name that
            the class's `get_name()` returns, such as its parent's name or `CUSTOM`.
        kind, vendor, priority, available: as for `OpImpl`.
        supports: AttentionRequest -> True, or the reason why not.
        disable: (the `impl` of each attention layer of the engine) -> None: make this backend's run
            vLLM's kernels. It is called at startup, before graphs are captured, if a comparison
            finds a fault or the backend raises. Without it, a fault ends the startup.
    """

    disable: Callable[[list[Any]], None] | None = field(default=None, kw_only=True)
    op_name = "attention_backend"


@dataclass(frozen=True)
class CommunicatorRequest:
    """The ranks that a communicator would connect, for `CommunicatorImpl.supports`.

    Args:
        settings: the engine's effective settings (`vllm_fl.settings.schema.Settings`).
        device_type: the type of `torch.device` (`cuda`).
        world_size: the engine's number of ranks, including replicas that share experts.
        tensor_parallel_size, pipeline_parallel_size, data_parallel_size: as set in vLLM.
        expert_parallel: whether the experts are distributed over the ranks.
        elastic: whether ranks may join and leave while the engine runs.
        compiled: whether the model is compiled.
    """

    settings: Any
    device_type: str
    world_size: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel: bool = False
    elastic: bool = False
    compiled: bool = False


class CommunicatorImpl(_ClassImpl[CommunicatorRequest]):
    """A communicator for vLLM's groups of ranks, by the path of its class.

    The class is imported when an engine of several ranks has chosen it.

    Args:
        impl_id: as for `OpImpl`.
        class_path: `module.Class`, a vLLM `DeviceCommunicatorBase` subclass; or CommunicatorRequest
            -> such a path. If vLLM's communicator is a `CudaCommunicator` or `XpuCommunicator`, the
            class must be a subclass. The function is called in each worker before the first group
            is created, and may load a library.
        kind, vendor, priority, available: as for `OpImpl`.
        supports: CommunicatorRequest -> True, or the reason why not. Called in every process of an
            engine. It may look for files, but should not load a library.
    """

    op_name = "communicator"


@dataclass(frozen=True)
class LayerRequest:
    """The engine that would use a whole layer, for `LayerImpl.supports`.

    Args:
        layer: the vLLM class that would be replaced.
        dtype: the model's dtype, as torch prints it (`torch.bfloat16`).
        quantization: vLLM's name of the model's quantisation method, or None.
        tensor_parallel_size, pipeline_parallel_size, data_parallel_size: as set in vLLM.
        expert_parallel_size: the number of ranks that share the experts, or 1.
        lora: whether LoRA adapters may be loaded. Some LoRA wrappers in vLLM call the quantisation
            method of the layer instead of its forward.
        compiled: whether the model is compiled.
    """

    layer: str
    dtype: Any
    quantization: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    lora: bool = False
    compiled: bool = False


@dataclass(frozen=True, eq=False)
class LayerImpl(_Impl):
    """A class for a whole vLLM layer, imported when it is chosen.

    Args:
        layer: the exact name of vLLM's class (`RowParallelLinear`), used as an op name in settings.
            Subclasses of that class are separate layers.
        class_path: `module.Class`, a subclass of that class.
        kind, vendor, priority, available: as for `OpImpl`.
        impl_id: as for `OpImpl`; for a VENDOR it is `vendor.<vendor>`, and may be omitted.
        supports: LayerRequest -> True, or the reason why not. Called once per engine, before its
            model is built, but only once per process for equal requests.
    """

    layer: str
    class_path: str
    kind: BackendImplKind
    vendor: str | None = None
    priority: int | None = None
    impl_id: str = field(default="", kw_only=True)
    available: Callable[[], Availability] | None = field(default=None, kw_only=True)
    supports: Callable[[LayerRequest], Availability] | None = field(default=None, kw_only=True)
    op_name: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        who = f"LayerImpl({self.layer!r})"
        if not isinstance(self.layer, str) or not _is_name(self.layer, op=False):
            raise ValueError(f"{who}: layer must be a class name such as 'RowParallelLinear'")
        check_path(who, "class_path", self.class_path)
        self._complete_id()
        object.__setattr__(self, "op_name", self.layer)  # in settings, the registry and the plan
        self._check(who)


LINEAR_SCHEMES = ("fp8", "fp8_block", "wfp8a16", "int8", "wna16", "mxfp8", "mxfp6", "mxfp4",
                  "nvfp4")  # fmt: skip
"""The quantisation schemes of linear layers."""

EXPERT_SCHEMES = ("fp8", "fp8_block", "int8", "wna16", "mxfp8", "mxfp4", "nvfp4")
"""The quantisation schemes of experts."""

LINEAR_OPS = tuple(f"{scheme}_linear" for scheme in LINEAR_SCHEMES)
EXPERT_OPS = tuple(f"{scheme}_experts" for scheme in EXPERT_SCHEMES)
KERNEL_OPS = (*LINEAR_OPS, *EXPERT_OPS)
"""The ops of quantised layers."""

VLLM_IDS = "vllm."
"""The beginning of the ids of vLLM's own classes for quantised layers."""


@dataclass(frozen=True, eq=False)
class KernelImpl(_Impl):
    """A class that computes quantised layers, imported when it is chosen.

    Args:
        scheme: one of `schemes`, such as `int8`. In settings the op is `<scheme><suffix>`.
        class_path: `module.Class`, a subclass of a class of vLLM.
        kind, vendor, priority, available: as for `OpImpl`.
        impl_id: as for `OpImpl`; for a VENDOR it is `vendor.<vendor>`, and may be omitted.
    """

    suffix: ClassVar[str]
    schemes: ClassVar[tuple[str, ...]]

    scheme: str
    class_path: str
    kind: BackendImplKind
    vendor: str | None = None
    priority: int | None = None
    impl_id: str = field(default="", kw_only=True)
    available: Callable[[], Availability] | None = field(default=None, kw_only=True)
    op_name: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        who = f"{type(self).__name__}({self.scheme!r})"
        object.__setattr__(self, "op_name", f"{self.scheme}{self.suffix}")
        if self.scheme not in self.schemes:
            raise ValueError(f"{who}: unknown scheme; expected {' or '.join(self.schemes)}")
        check_path(who, "class_path", self.class_path)
        self._complete_id()
        self._check(who)


class LinearKernelImpl(KernelImpl):
    """A class for quantised linear layers. It extends vLLM's base class for the scheme, such as
    `Int8ScaledMMLinearKernel`. vLLM calls its `is_supported` and `can_implement`."""

    suffix, schemes = "_linear", LINEAR_SCHEMES


class ExpertKernelImpl(KernelImpl):
    """A class for quantised experts. It extends a class of vLLM for the scheme, such as
    `TritonExperts`, and gets weights that vLLM has converted for that class. vLLM calls its
    `is_supported_config`."""

    suffix, schemes = "_experts", EXPERT_SCHEMES


ATTENTION, COMMUNICATOR = AttentionImpl.op_name, CommunicatorImpl.op_name
"""The op names of attention backends and communicators."""

NAMED_CLASSES = (ATTENTION, COMMUNICATOR, *KERNEL_OPS)
"""Ops that are implemented by classes and have no contract."""

Impl = OpImpl | AttentionImpl | CommunicatorImpl | LayerImpl | KernelImpl
"""Any implementation."""


def _is_name(text: str, *, op: bool) -> bool:
    """Return whether this can be the name of an op, or of a layer, which is capitalized."""
    return text.isidentifier() and not keyword.iskeyword(text) and text[0].isupper() is not op
