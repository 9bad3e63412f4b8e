"""The public names of `vllm_fl`, for backends."""

# ruff: noqa: PLC0414 (an alias with the same name marks a re-export)
from __future__ import annotations

from .contracts import *  # noqa: F403
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
from .plugins.answers import Availability as Availability
from .plugins.device import DeviceProfile as DeviceProfile
from .plugins.hookspecs import HOOK_API as HOOK_API
from .plugins.hookspecs import hookimpl as hookimpl
from .plugins.inspection import Check as Check
from .plugins.inspection import Engine as Engine
from .plugins.inspection import Finding as Finding
from .plugins.inspection import GroupFacts as GroupFacts
from .plugins.inspection import Key as Key
from .plugins.inspection import Moment as Moment
from .plugins.inspection import Objection as Objection
from .plugins.inspection import WorkerContext as WorkerContext
from .plugins.inspection import WorkerReport as WorkerReport
from .plugins.setting import PolicyDefaults as PolicyDefaults
from .plugins.setting import SettingSpec as SettingSpec
from .plugins.types import AttentionImpl as AttentionImpl
from .plugins.types import AttentionRequest as AttentionRequest
from .plugins.types import BackendImplKind as BackendImplKind
from .plugins.types import BackendPriority as BackendPriority
from .plugins.types import CommunicatorImpl as CommunicatorImpl
from .plugins.types import CommunicatorRequest as CommunicatorRequest
from .plugins.types import ExpertKernelImpl as ExpertKernelImpl
from .plugins.types import LayerImpl as LayerImpl
from .plugins.types import LayerRequest as LayerRequest
from .plugins.types import LinearKernelImpl as LinearKernelImpl
from .plugins.types import OpImpl as OpImpl
