import sys

from vllm_fl_ops.contracts import quick_gelu

sys.modules[__name__] = quick_gelu
