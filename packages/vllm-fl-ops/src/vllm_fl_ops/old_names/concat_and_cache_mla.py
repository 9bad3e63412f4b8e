from vllm_fl_ops.contracts.concat_and_cache_mla import *
