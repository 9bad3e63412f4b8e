import sys

from vllm_fl_ops.contracts import gelu_new

sys.modules[__name__] = gelu_new
