from vllm_fl_ops.contracts.recurrent_gated_delta_rule import *
