from vllm_fl_ops.contracts.xielu import *
