import sys

from vllm_fl_ops.contracts import sequences

sys.modules[__name__] = sequences
