from vllm_fl_ops.contracts.gelu_fast import *
