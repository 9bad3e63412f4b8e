from vllm_fl_ops.contracts.fused_experts import *
