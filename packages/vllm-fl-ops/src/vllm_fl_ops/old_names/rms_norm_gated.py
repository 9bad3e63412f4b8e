from vllm_fl_ops.contracts.rms_norm_gated import *
