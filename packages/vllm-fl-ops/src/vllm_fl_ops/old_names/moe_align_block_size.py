import sys

from vllm_fl_ops.contracts import moe_align_block_size

sys.modules[__name__] = moe_align_block_size
