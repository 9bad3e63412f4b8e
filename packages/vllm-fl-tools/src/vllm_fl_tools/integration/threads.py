"""With how many threads vLLM's worker computes on a CPU, known without an engine."""

from __future__ import annotations

__all__ = ["worker_threads"]


def worker_threads() -> int | None:
    """The number of threads of the first rank's worker on a CPU, by vLLM's own rule.

    vLLM gives each worker a list of cores to compute on, by VLLM_CPU_OMP_THREADS_BIND or from what
    the machine has, and keeps some for its other processes. Here it only makes the lists: no
    process is bound to them.

    Returns:
        The length of the first rank's list; None where vLLM makes none, and torch's own number
        holds: `nobind`, an engine without worker processes, or a vLLM for another device.

    Raises:
        ImportError: there is no vLLM, or it has no such rule.
        Exception: an engine would not start with these variables; whatever vLLM raises.
    """
    from vllm import envs
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.platforms import current_platform
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    if not current_platform.is_cpu():
        return None
    ranks = envs.VLLM_CPU_OMP_THREADS_BIND.count("|") + 1
    config = VllmConfig(parallel_config=ParallelConfig(tensor_parallel_size=ranks))
    if config.parallel_config.distributed_executor_backend != "mp":
        return None
    lists: list[list[int]] = OMPProcessManager(config).cpu_lists
    return len(lists[0]) if lists else None
