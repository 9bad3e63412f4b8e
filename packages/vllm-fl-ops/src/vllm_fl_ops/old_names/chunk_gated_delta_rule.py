from vllm_fl_ops.contracts.chunk_gated_delta_rule import *
