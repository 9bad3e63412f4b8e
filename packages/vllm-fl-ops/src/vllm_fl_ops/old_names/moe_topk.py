from vllm_fl_ops.contracts.moe_topk import *
