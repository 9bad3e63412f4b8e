from vllm_fl_ops.contracts.rms_norm import *
