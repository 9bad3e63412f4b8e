from vllm_fl_ops.contracts.merge_attn_states import *
