"""Modules that import vLLM as they are imported: where there is none, they have no examples to run."""

from importlib.util import find_spec

_VLLM = "midstream/backends/vllm"
_THERE = ("llm.py", "plugin/connector.py", "routes/app.py", "routes/completions.py", "routes/opening.py")
collect_ignore = [] if find_spec("vllm") else ["midstream/compat/vllm.py", *(f"{_VLLM}/{name}" for name in _THERE)]
