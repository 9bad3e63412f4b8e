import sys

from vllm_fl_ops.contracts import relu2

sys.modules[__name__] = relu2
