"""A device without a vLLM platform, emulated on the CPU: the code path of real hardware."""

from __future__ import annotations

from vllm_fl import DeviceProfile, WorkerContext, WorkerReport, hookimpl


@hookimpl
def device() -> DeviceProfile:
    return DeviceProfile(
        "oot_cpu",
        platform_class="oot_cpu.platform.OotCpuPlatform",
        worker_class="oot_cpu.worker.OotCpuWorker",
        communicator_class="oot_cpu.communicator.OotCpuCommunicator",
        dist_backend="gloo",
        detect=lambda: True,
    )


@hookimpl
def worker_start(context: WorkerContext) -> WorkerReport:
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.platforms import current_platform

    communicator = get_tp_group().device_communicator
    return WorkerReport(
        (
            f"oot_cpu: platform {type(current_platform).__name__} {current_platform._enum.name}",
            f"oot_cpu: worker {context.vllm_config.parallel_config.worker_cls}",
            f"oot_cpu: communicator {type(communicator).__name__}",
        )
    )
