import sys

from vllm_fl_ops.contracts import routing

sys.modules[__name__] = routing
