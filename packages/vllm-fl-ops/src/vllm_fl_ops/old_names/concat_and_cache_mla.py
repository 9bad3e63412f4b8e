import sys

from vllm_fl_ops.contracts import concat_and_cache_mla

sys.modules[__name__] = concat_and_cache_mla
