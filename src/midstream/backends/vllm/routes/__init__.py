"""Runs in the API server of a `vllm serve` that was started with our plugin: the entry point `vllm.endpoint_plugins`.

vLLM loads it where VLLM_PLUGINS names `midstream`. In a server whose engine has no taps its routes say so.
"""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any


class Endpoint:
    """vLLM's EndpointPlugin."""

    name = "midstream"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add our routes, and put ours for completions in the place of vLLM's."""
        from . import app as ours
        from . import completions

        app.include_router(ours.router)
        completions.attach(app)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Once the engine is up: put it to the self-test, and open it to requests that ask for something."""
        from .opening import opened

        await opened(engine_client, state, args)
