from vllm_fl_ops.contracts.paging import *
