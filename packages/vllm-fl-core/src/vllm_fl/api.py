"""The names that everything else is written with: what a backend imports from `vllm_fl`."""

# ruff: noqa: PLC0414 (an alias of its own says that a name is handed on)
from __future__ import annotations

from .contracts import BadInput as BadInput
from .contracts import Exact as Exact
from .contracts import ExpertBlocks as ExpertBlocks
from .contracts import ModelSizes as ModelSizes
from .contracts import OpSpec as OpSpec
from .contracts import QuantisedPair as QuantisedPair
from .contracts import Routing as Routing
from .contracts import Sample as Sample
from .contracts import Tolerance as Tolerance
from .contracts import Variant as Variant
from .contracts import Within as Within
from .contracts.binding import AttentionTarget as AttentionTarget
from .contracts.binding import Binding as Binding
from .contracts.binding import Contract as Contract
from .contracts.binding import FunctionTarget as FunctionTarget
from .contracts.binding import GraphTarget as GraphTarget
from .contracts.binding import IrTarget as IrTarget
from .contracts.binding import LayerTarget as LayerTarget
from .contracts.binding import OperatorTarget as OperatorTarget
from .contracts.binding import Route as Route
from .contracts.binding import SizeRule as SizeRule
from .contracts.sampling import Source as Source
from .errors import PluginError as PluginError
from .errors import SettingsError as SettingsError
from .errors import VllmFLError as VllmFLError
from .logs import get_logger as get_logger
from .plugins.finding import Finding as Finding
from .plugins.hookspecs import HOOK_API as HOOK_API
from .plugins.hookspecs import hookimpl as hookimpl
from .plugins.inspection import Check as Check
from .plugins.inspection import Engine as Engine
from .plugins.inspection import GroupFacts as GroupFacts
from .plugins.inspection import Key as Key
from .plugins.inspection import Moment as Moment
from .plugins.inspection import Objection as Objection
from .plugins.types import AttentionImpl as AttentionImpl
from .plugins.types import AttentionRequest as AttentionRequest
from .plugins.types import Availability as Availability
from .plugins.types import BackendImplKind as BackendImplKind
from .plugins.types import BackendPriority as BackendPriority
from .plugins.types import CommunicatorImpl as CommunicatorImpl
from .plugins.types import CommunicatorRequest as CommunicatorRequest
from .plugins.types import DeviceProfile as DeviceProfile
from .plugins.types import LayerImpl as LayerImpl
from .plugins.types import LayerRequest as LayerRequest
from .plugins.types import OpImpl as OpImpl
from .plugins.types import PolicyDefaults as PolicyDefaults
from .plugins.types import SettingSpec as SettingSpec
from .plugins.types import WorkerContext as WorkerContext
from .plugins.types import WorkerReport as WorkerReport
