import sys

from vllm_fl_ops.contracts import rotary_embedding

sys.modules[__name__] = rotary_embedding
