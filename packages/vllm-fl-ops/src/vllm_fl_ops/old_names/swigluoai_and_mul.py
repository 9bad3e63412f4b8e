from vllm_fl_ops.contracts.swigluoai_and_mul import *
