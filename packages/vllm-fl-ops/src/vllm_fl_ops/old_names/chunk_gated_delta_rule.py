import sys

from vllm_fl_ops.contracts import chunk_gated_delta_rule

sys.modules[__name__] = chunk_gated_delta_rule
