import sys

from vllm_fl_ops.contracts import mul_and_silu

sys.modules[__name__] = mul_and_silu
