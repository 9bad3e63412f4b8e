from vllm_fl_ops.contracts.linear import *
