from vllm_fl_ops.contracts.sequences import *
