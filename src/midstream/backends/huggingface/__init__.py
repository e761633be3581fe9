"""Models of Hugging Face transformers in this process: the default backend, needs no GPU."""
