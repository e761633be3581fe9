"""What is written and read back: capture files, vLLM's hidden-states files, tensors over HTTP."""
