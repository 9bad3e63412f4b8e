from vllm_fl_ops.contracts.activations import *
