"""The command `vllm-fl`, the conformance kit, and what operators use: metrics, reports, locks."""
