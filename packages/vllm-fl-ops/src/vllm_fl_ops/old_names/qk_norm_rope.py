import sys

from vllm_fl_ops.contracts import qk_norm_rope

sys.modules[__name__] = qk_norm_rope
