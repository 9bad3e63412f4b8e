from vllm_fl_ops.contracts.causal_conv1d_update import *
