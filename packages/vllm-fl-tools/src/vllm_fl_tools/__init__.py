"""The command `vllm-fl`, the conformance kit, and operators' files: metrics, reports, locks."""
