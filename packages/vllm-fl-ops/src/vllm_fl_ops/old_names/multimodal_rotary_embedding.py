import sys

from vllm_fl_ops.contracts import multimodal_rotary_embedding

sys.modules[__name__] = multimodal_rotary_embedding
