from vllm_fl_ops.contracts.mul_and_silu import *
