import sys

from vllm_fl_ops.contracts import recurrent_gated_delta_rule

sys.modules[__name__] = recurrent_gated_delta_rule
