from vllm_fl_ops.contracts.quant_fp8 import *
