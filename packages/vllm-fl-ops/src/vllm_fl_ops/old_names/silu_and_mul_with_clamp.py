from vllm_fl_ops.contracts.silu_and_mul_with_clamp import *
