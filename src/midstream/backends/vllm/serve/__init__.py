"""The `vllm-serve` backend: one or more `vllm serve` that carry our plugin, from a process that needs no vLLM."""
