"""vLLM's GPU worker without GPU memory, with a CPU model runner."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_worker import Worker, init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes
from vllm.v1.worker.workspace import init_workspace_manager

from . import graphs

KV_CACHE = 256 << 20
"""Default bytes of KV cache."""


class BareCpuWorker(Worker):
    def init_device(self) -> None:
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        init_workspace_manager(self.device)
        self.model_runner = self._make_model_runner()

    def _make_model_runner(self) -> Any:
        if not self.use_v2_model_runner:
            # Without CUDA streams or events, and without vLLM's operators.
            return CPUModelRunner(self.vllm_config, self.device)
        # First: it replaces CUDA's streams and pinned memory before their users are imported.
        import vllm.v1.worker.cpu.shm  # noqa: F401
        from vllm.triton_utils.dispatcher import register_kernels
        from vllm.v1.sample.ops import topk_topp_sampler
        from vllm.v1.worker.cpu.model_runner import CPUModelRunner as SecondRunner

        # Triton's interpreter cannot run two kernels: one has a PyTorch form, and requests here
        # never use grammars, which need the other.
        topk_topp_sampler.HAS_TRITON = False
        kernel = "vllm.v1.worker.gpu.structured_outputs._apply_grammar_bitmask_kernel"
        register_kernels({kernel: lambda *_, **__: None})
        return SecondRunner(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        self.model_runner.warming_up_model()  # compiles the model
        return self.cache_config.kv_cache_memory_bytes or KV_CACHE

    def compile_or_warm_up_model(self) -> CompilationTimes:
        if self.use_v2_model_runner:
            from vllm.v1.worker.gpu.warmup import warmup_kernels

            warmup_kernels(self.model_runner, self.execute_model, self.sample_tokens)
            if envs.VLLM_USE_BREAKABLE_CUDAGRAPH:
                graphs.install()
                self.model_runner.capture_model()
        set_random_seed(self.model_config.seed)
        config = self.vllm_config.compilation_config
        return CompilationTimes(config.compilation_time, config.encoder_compilation_time)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()
