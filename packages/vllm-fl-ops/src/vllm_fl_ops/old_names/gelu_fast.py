import sys

from vllm_fl_ops.contracts import gelu_fast

sys.modules[__name__] = gelu_fast
