from vllm_fl_ops.contracts.routing import *
