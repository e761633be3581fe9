"""Engine processes that die: whoever waits for one is told so."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import InvalidStateError
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

from midstream.core.errors import EngineError


def watch(client: Any) -> None:
    """Wake what waits for an engine process when the process ends, with vLLM's EngineDeadError.

    client: `llm.llm_engine.engine_core`. vLLM's own monitor marks the client as dead, so that later calls are refused,
    but a call that already waits for the process's answer would wait for ever. An engine in this process has none.
    """
    resources = getattr(client, "resources", None)
    sentinels = getattr(resources and resources.engine_manager, "sentinels", None)  # Ray's actors have none
    if sentinels is not None:
        # not the client itself: vLLM frees an engine when its client is gone
        held = (sentinels(), resources, client.outputs_queue, client.utility_results)
        Thread(target=_wake, args=held, name="midstream-engine-watch", daemon=True).start()


def _wake(sentinels: list[int], resources: Any, outputs: Any, answers: dict[int, Any]) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    wait(sentinels)
    # marked before those who wait are woken: whoever comes in between is refused by the mark
    resources.engine_dead = True
    outputs.put_nowait(EngineDeadError())
    for future in list(answers.values()):
        with suppress(InvalidStateError):  # answered a moment before
            future.set_exception(EngineDeadError())


@contextmanager
def dying() -> Generator[None]:
    """What vLLM says of an engine whose process has gone, in our words: EngineError."""
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        raise EngineError("the vLLM engine has died, and its requests with it: close it, and load it again") from error
