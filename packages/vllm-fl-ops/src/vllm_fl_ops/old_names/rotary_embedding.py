from vllm_fl_ops.contracts.rotary_embedding import *
