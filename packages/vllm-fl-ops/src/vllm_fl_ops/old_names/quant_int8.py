from vllm_fl_ops.contracts.quant_int8 import *
