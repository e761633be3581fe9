"""The entry point `vllm.general_plugins`, and the places of vLLM at which an engine that asks is given taps.

vLLM calls `register` in every process. It wraps four methods: that of a worker which loads the model, so that layers
are wrapped before the first trace; the constructor of the scheduler, which has the prefix cache; that of the input
processor, through which every request comes; and that of the engine as its client sees it, which is put to the
self-test. All look at the engine's own configuration first.
"""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from midstream.core.errors import ModelLoadError, SpecError

from ..requests import KEY, EngineSettings

_DONE: Final = "_midstream"


def settings_of(vllm_config: Any) -> EngineSettings | None:
    """What an engine's `additional_config` says under our name; None in one that does not ask. Or ModelLoadError."""
    given = getattr(vllm_config, "additional_config", None)
    settings = given.get(KEY) if isinstance(given, dict) else None
    try:
        return None if settings is None else EngineSettings.of(settings)
    except SpecError as error:
        raise ModelLoadError(str(error)) from None


def register() -> None:
    """Wrap the methods, once per process."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_worker import Worker

    _after(Worker, "load_model", _tap_worker)
    _after(Scheduler, "__init__", _tap_scheduler)
    _after(InputProcessor, "__init__", _tap_input)
    _after(LLMEngine, "__init__", _examine)
    _after(AsyncLLM, "__init__", _close)


def _after(owner: Any, name: str, then: Callable[[Any], None]) -> None:
    """Let a method of a class be followed by a call with its object."""
    original = getattr(owner, name)
    if hasattr(original, _DONE):
        return

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if settings_of(self.vllm_config) is not None:
            then(self)
        return result

    setattr(method, _DONE, True)
    setattr(owner, name, method)


def _tap_worker(worker: Any) -> None:
    from .worker import attach

    attach(worker)


def _tap_scheduler(scheduler: Any) -> None:
    from .prefix_cache import attach

    attach(scheduler)


def _tap_input(processor: Any) -> None:
    from .admission import attach

    attach(processor)


def _examine(engine: Any) -> None:
    from ..facts import attach

    attach(engine)


def _close(engine: Any) -> None:
    """An asynchronous engine is put to the self-test by whoever serves it; until then nothing of it is tapped."""
    from .admission import close

    close(engine.input_processor)
