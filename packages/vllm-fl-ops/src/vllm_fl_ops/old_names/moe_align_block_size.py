from vllm_fl_ops.contracts.moe_align_block_size import *
