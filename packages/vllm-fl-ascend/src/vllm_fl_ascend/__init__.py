"""The Huawei Ascend backend of vllm-fl."""
