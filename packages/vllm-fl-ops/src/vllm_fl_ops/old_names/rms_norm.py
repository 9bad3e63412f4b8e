import sys

from vllm_fl_ops.contracts import rms_norm

sys.modules[__name__] = rms_norm
