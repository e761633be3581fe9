"""`vllm.LLM`, asked for taps: what stands in place of `from vllm import LLM`."""

from midstream.backends.vllm.llm import LLM

__all__ = ["LLM"]
