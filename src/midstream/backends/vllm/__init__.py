"""The `vllm` backend: a stock vLLM engine in this process; imports without vLLM."""

from .plugin.file_settings import hidden_states_files

__all__ = ["hidden_states_files"]
