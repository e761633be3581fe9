"""The `vllm` backend: a stock vLLM engine in this process; imports without vLLM."""
