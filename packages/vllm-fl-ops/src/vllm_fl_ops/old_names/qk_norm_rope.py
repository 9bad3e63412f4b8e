from vllm_fl_ops.contracts.qk_norm_rope import *
