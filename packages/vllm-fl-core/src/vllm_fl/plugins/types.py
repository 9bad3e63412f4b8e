"""What a plugin hands to core: values that describe implementations. No torch, no vllm.

A plugin returns these from its hooks; core never hands it anything to change.
"""

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
from typing import Any, Generic, Literal, TypeVar

from ..contracts.takes import Rule
from ..text import clean, quote
from .breadcrumb import running

R = TypeVar("R")

Availability = Literal[True] | str
"""True, or the reason why not."""


class BackendImplKind(enum.StrEnum):
    """Who an implementation comes from: text, namely the token that settings use."""

    DEFAULT = "flagos"
    VENDOR = "vendor"
    REFERENCE = "reference"


class BackendPriority(enum.IntEnum):
    """Priority inside one kind, higher first. Spaced by 50 so that others fit between."""

    DEFAULT = 150
    VENDOR = 100
    REFERENCE = 50


class _Impl:
    """What every implementation says of itself: whose it is, and whether it can run here."""

    op_name: str
    impl_id: str
    kind: BackendImplKind
    vendor: str | None
    priority: int | None
    available: Callable[[], Availability] | None

    @property
    def vendors(self) -> frozenset[str]:
        """Its vendor's name, none for other kinds; as its id has it, too, if that differs."""
        own = self.impl_id.partition(".")[2]
        return frozenset((self.vendor, own)) if self.vendor else frozenset()

    def availability(self) -> Availability:
        """True, or why it cannot run here. Probed once per process; a negative keeps its reason."""
        # A child process probes anew: its device may be another one.
        cached: tuple[int, Availability] | None = self.__dict__.get("_availability")
        if cached is not None and cached[0] == os.getpid():
            return cached[1]
        verdict = self._probe()
        object.__setattr__(self, "_availability", (os.getpid(), verdict))
        return verdict

    def is_available(self) -> bool:
        """Whether it can run on this machine."""
        return self.availability() is True

    def _probe(self) -> Availability:
        fn = getattr(self, "fn", None)
        if self.available is None and inspect.isfunction(fn) and not hasattr(fn, "_is_available"):
            return True

        def ask() -> Availability:
            available = self.available or older_probe(fn)
            return True if available is None else available()

        note = f"the availability check of {self.op_name}={self.impl_id}"
        with running(note):
            return answered("its availability check", ask)

    def _check(self, who: str) -> None:
        for name in ("available", "supports", "choices"):
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
                raise ValueError(f"{who}: a vendor's impl_id is {wanted!r}")
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
        op_name: the op, as its contract names it (`rms_norm`).
        impl_id: unique within the op: `default.flagos`, `reference.torch`, `vendor.<vendor>`.
        kind: who it comes from.
        fn: the implementation; its parameters are the contract's, by name, order and default.
            A first parameter `self` or `obj` marks an implementation that needs a layer.
        vendor: the vendor's name; required for kind VENDOR and refused for the others. One that
            differs from the id's in case alone is deprecated: settings may use either.
        priority: order inside a kind, higher first; None takes the kind's.
        available: () -> True, or the reason why it cannot run on this machine. Called once per
            process, so that it may look for a device; it should not import a whole stack.
        supports: the contract's parameters -> True, or the reason for refusing these arguments.
            It may look at dtype, rank, layout, None-ness; not at values, nor at the batch size.
        takes: instead of `supports`: the calls that keep the contract and these rules, each an
            expression such as `epsilon >= 0`, or a function of some arguments
            (`contracts/takes.py`). It is compiled when the implementation is registered. If it
            is empty and `fn` is traceable, `fn` itself raises NotImplementedError for other calls.
        consumes: parameters that `fn` may overwrite, in calls whose variant has results to put
            there (`OpSpec.consumed`). Results are what it returns all the same.
        traceable: True lets the compiler trace into `fn`; False makes it one opaque op.
        choices: () -> the choices that `fn` has made by timing so far, such as tile sizes: a
            mapping of JSON-able values. Called for each report, by any thread; must not use the
            device. The ranks compare it once the KV cache is allocated (FL503).
        supported_dtypes, min_arch: accepted, and without effect: say it in `supports` and
            `available`.

    Raises:
        ValueError: a VENDOR without vendor, an id that is not `vendor.<vendor>`, a name that is
            no identifier.
        TypeError: a field that should be callable is not, or a field has another type.
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
            raise ValueError(f"{who}: takes is instead of supports")
        if isinstance(self.consumes, str):
            raise TypeError(f"{who}: consumes must be a set of parameter names, got a string")
        object.__setattr__(self, "consumes", frozenset(self.consumes))

    @cached_property  # asked at every call that is refused
    def needs_layer(self) -> bool:
        """Whether `fn` takes the calling layer first (its parameter is `self` or `obj`)."""
        parameters = parameters_of(self.fn)
        return bool(parameters and parameters[0].name in ("self", "obj"))


@dataclass(frozen=True)
class AttentionRequest:
    """What vLLM asks of an attention backend, for `AttentionImpl.supports`.

    Args:
        head_size: features of one head.
        dtype: the model's dtype, as torch names it (`torch.bfloat16`).
        kv_cache_dtype: `auto`, `fp8`, …
        block_size: tokens in one KV-cache block, or None when it is still open.
        use_mla, has_sink, use_sparse: as in vLLM's selector; False where a vLLM lacks the field.
        num_heads: query heads of one rank, or None.
        extras: the fields that a newer vLLM adds to its selector, by name; read them with `.get`,
            since an older vLLM has none. Where the whole model is asked for, `is_hybrid` is there:
            other layers of it keep states, and vLLM lays pages of two forms out in one memory.
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
    """A class of vLLM's kind, by its path; nothing is imported until it is chosen."""

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


class AttentionImpl(_ClassImpl[AttentionRequest]):
    """An attention backend, by the path of its class; nothing is imported until it is chosen.

    Args:
        impl_id: as for `OpImpl`.
        class_path: `module.Class`, a subclass of vLLM's `AttentionBackend`; or AttentionRequest ->
            such a path, where one backend has several classes (MLA, sparse). The class's
            `get_name()` must be one that vLLM knows: its parent's, or `CUSTOM`.
        kind, vendor, priority, available: as for `OpImpl`.
        supports: AttentionRequest -> True, or the reason for refusing it.
    """

    op_name = "attention_backend"


@dataclass(frozen=True)
class CommunicatorRequest:
    """The ranks that a communicator would connect, for `CommunicatorImpl.supports`.

    Args:
        settings: the engine's effective settings (`vllm_fl.settings.schema.Settings`).
        device_type: as `torch.device` has it (`cuda`).
        world_size: how many ranks the engine has, replicas that share experts included.
        tensor_parallel_size, pipeline_parallel_size, data_parallel_size: as vLLM was told.
        expert_parallel: whether the experts are spread over the ranks.
        elastic: whether ranks may come and go while the engine runs.
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
    """What vLLM's groups of ranks exchange tensors through, by the path of its class.

    Nothing is imported until an engine of several ranks has chosen it.

    Args:
        impl_id: as for `OpImpl`.
        class_path: `module.Class`, a subclass of vLLM's `DeviceCommunicatorBase`, and of
            `CudaCommunicator` or `XpuCommunicator` where vLLM's own is one; or
            CommunicatorRequest -> such a path. It is asked in each worker, before the first group
            is made: the place to load a library.
        kind, vendor, priority, available: as for `OpImpl`.
        supports: CommunicatorRequest -> True, or the reason for refusing it. Asked in every process
            of an engine: it may look for files, and should load no library.
    """

    op_name = "communicator"


@dataclass(frozen=True)
class LayerRequest:
    """The engine that a whole layer would serve in, for `LayerImpl.supports`.

    Args:
        layer: vLLM's class that would be replaced.
        dtype: the model's dtype, as torch names it (`torch.bfloat16`).
        quantization: the name of the model's quantisation method, as vLLM has it; None without.
        tensor_parallel_size, pipeline_parallel_size, data_parallel_size: as vLLM was told.
        expert_parallel_size: over how many ranks the experts are spread; 1 without.
        lora: whether LoRA adapters may be loaded. Some of vLLM's wrappers for them call the layer's
            quantisation method in place of its forward.
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
    """A class of one's own for a whole layer of vLLM's; nothing is imported until it is chosen.

    Args:
        layer: the name of vLLM's class, exactly (`RowParallelLinear`). In settings it stands where
            an op's name does. Subclasses of that class are layers of their own.
        class_path: `module.Class`, a subclass of that class.
        kind, vendor, priority, available: as for `OpImpl`.
        impl_id: as for `OpImpl`; a VENDOR's is `vendor.<vendor>`, and may be left out.
        supports: LayerRequest -> True, or the reason for refusing it. Asked once per engine, before
            its model is built; the same request is not asked again in one process.
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
        if self.impl_id == "" and self.kind is BackendImplKind.VENDOR:
            object.__setattr__(self, "impl_id", f"vendor.{self.vendor}")
        object.__setattr__(self, "op_name", self.layer)  # in settings, the registry and the plan
        self._check(who)


ATTENTION, COMMUNICATOR = AttentionImpl.op_name, CommunicatorImpl.op_name
"""The ops under which attention backends and communicators are registered, resolved and planned."""

NAMED_CLASSES = (ATTENTION, COMMUNICATOR)
"""The ops whose implementations name a class, and which have no contract."""

Impl = OpImpl | AttentionImpl | CommunicatorImpl | LayerImpl
"""What the policy decides between."""


@dataclass(frozen=True)
class PolicyDefaults:
    """A plugin's settings for one platform, read from the YAML file that it ships.

    Args:
        path: the YAML file; its keys are those of a user's file, `allow_vendors` excepted.
    """

    path: str | os.PathLike[str]


def _is_name(text: str, *, op: bool) -> bool:
    """Whether this can be the name of an op, or of a layer, which begins with a capital letter."""
    return text.isidentifier() and not keyword.iskeyword(text) and text[0].isupper() is not op


def check_path(who: str, which: str, path: object) -> None:
    """Raise ValueError if `path` is not `module.Class`."""
    if not isinstance(path, str) or "." not in path.strip("."):
        raise ValueError(f"{who}: {which} must be 'module.Class', got {path!r}")


def parameters_of(fn: Callable[..., Any]) -> tuple[inspect.Parameter, ...] | None:
    """The parameters of `fn`; None for a builtin that does not tell them."""
    try:
        return tuple(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return None


def answered(who: str, ask: Callable[[], object]) -> Availability:
    """True, or why not, of foreign code that is asked; a breakage is a negative with a reason.

    Args:
        who: what is asked, for the reason: `its supports`.
        ask: asks it.
    """
    try:
        verdict = ask()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # never a crash
        return f"{who} raised {quote(error)}"
    if verdict is True:
        return True
    if isinstance(verdict, str) and verdict:
        return clean(verdict)
    return f"{who} said no and gave no reason"


def older_probe(fn: object) -> Callable[[], Availability] | None:
    """How the older form says it: on the function, or on the backend that it is a method of."""
    probe = getattr(fn, "_is_available", None)
    probe = probe or getattr(getattr(fn, "__self__", None), "is_available", None)
    return probe if callable(probe) else None
