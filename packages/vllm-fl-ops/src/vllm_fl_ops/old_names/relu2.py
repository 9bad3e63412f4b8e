from vllm_fl_ops.contracts.relu2 import *
