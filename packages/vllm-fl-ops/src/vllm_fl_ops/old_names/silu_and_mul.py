from vllm_fl_ops.contracts.silu_and_mul import *
