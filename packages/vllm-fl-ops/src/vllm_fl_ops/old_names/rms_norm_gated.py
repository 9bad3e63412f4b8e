import sys

from vllm_fl_ops.contracts import rms_norm_gated

sys.modules[__name__] = rms_norm_gated
