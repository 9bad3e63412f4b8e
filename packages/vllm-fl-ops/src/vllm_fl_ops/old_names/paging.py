import sys

from vllm_fl_ops.contracts import paging

sys.modules[__name__] = paging
