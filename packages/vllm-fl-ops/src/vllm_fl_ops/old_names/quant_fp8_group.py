from vllm_fl_ops.contracts.quant_fp8_group import *
