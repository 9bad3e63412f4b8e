from vllm_fl_ops.contracts.quick_gelu import *
