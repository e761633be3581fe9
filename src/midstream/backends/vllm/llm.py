"""`vllm.LLM`, asked for taps."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any

from vllm import LLM as _LLM


class LLM(_LLM):
    """vLLM's own class; its engines have midstream's taps, as with `additional_config={"midstream": {}}`."""

    def __init__(self, *args: Any, additional_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, additional_config={"midstream": {}, **(additional_config or {})}, **kwargs)
