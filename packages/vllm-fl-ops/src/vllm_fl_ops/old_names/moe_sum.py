import sys

from vllm_fl_ops.contracts import moe_sum

sys.modules[__name__] = moe_sum
