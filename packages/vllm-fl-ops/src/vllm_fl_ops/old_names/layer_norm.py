import sys

from vllm_fl_ops.contracts import layer_norm

sys.modules[__name__] = layer_norm
