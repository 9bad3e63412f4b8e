import sys

from vllm_fl_ops.contracts import linear

sys.modules[__name__] = linear
