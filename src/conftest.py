"""Modules that import vLLM as they are imported: where there is none, they have no examples to run."""

from importlib.util import find_spec

_VLLM = "midstream/backends/vllm"
collect_ignore = (
    [] if find_spec("vllm") else ["midstream/compat/vllm.py", f"{_VLLM}/llm.py", f"{_VLLM}/plugin/connector.py"]
)
