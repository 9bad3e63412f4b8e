from vllm_fl_ops.contracts.gelu_and_mul_sparse import *
