from vllm_fl_ops.contracts.gdn_gating import *
