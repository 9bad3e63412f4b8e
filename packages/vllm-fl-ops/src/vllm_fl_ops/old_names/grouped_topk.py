from vllm_fl_ops.contracts.grouped_topk import *
