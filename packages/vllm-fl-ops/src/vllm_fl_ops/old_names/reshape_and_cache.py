from vllm_fl_ops.contracts.reshape_and_cache import *
