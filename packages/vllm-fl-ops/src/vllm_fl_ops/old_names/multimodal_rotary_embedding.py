from vllm_fl_ops.contracts.multimodal_rotary_embedding import *
