from vllm_fl_ops.contracts.fatrelu_and_mul import *
