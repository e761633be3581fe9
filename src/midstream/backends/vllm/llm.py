"""`vllm.LLM`, asked for taps."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from typing import Any

from vllm import LLM as _LLM

from .requests import KEY


class LLM(_LLM):
    """vLLM's own class, with `additional_config={"midstream": {}}` and `async_scheduling=False`."""

    def __init__(self, *args: Any, additional_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        asked = {KEY: {}, **(additional_config or {})}
        super().__init__(*args, additional_config=asked, **{"async_scheduling": False, **kwargs})
