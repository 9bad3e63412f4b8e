from vllm_fl_ops.contracts.layer_norm import *
