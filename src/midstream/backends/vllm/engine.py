"""One vLLM engine in this process: its boot, its requests, and the calls that our plugin answers in its workers."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Final

import torch

from midstream.core.errors import BusyError, EngineError, ModelLoadError, PromptError, SpecError

from .environment import boot_environment
from .facts import FACTS, EngineFacts
from .liveness import dying
from .plugin.activation import settings_of
from .requests import KEY
from .reuse import RowStore

TESTED: Final = ((0, 29), (0, 33))
"""The versions of vLLM that this code was written for: from the first, up to and without the second."""
STAGED_BYTES: Final = 1 << 30
"""Of artifacts that workers hold; past it they forget those that nobody uses before new ones come."""
_ADOPTED: Final = "midstream_engine"
_AT_BOOT: Final = (
    ValueError, RuntimeError, OSError, TypeError, NotImplementedError, AssertionError, ImportError, KeyError,
)  # fmt: skip


@dataclass(eq=False)
class Engine:
    """An engine that is up. `close` frees it, unless it is the caller's own (`adopted`)."""

    llm: Any
    facts: EngineFacts
    store: RowStore
    lora: Any = None
    own: bool = True
    _staged: dict[str, int] = field(default_factory=dict[str, int])
    _busy: Lock = field(default_factory=Lock)

    @property
    def eos(self) -> frozenset[int]:
        """What its own tokenizer ends a text with, and so a grammar."""
        tokenizer = self.llm.get_tokenizer() if self.has_tokenizer else None
        found = getattr(tokenizer, "eos_token_id", None)
        return frozenset() if found is None else frozenset([found])

    @property
    def has_tokenizer(self) -> bool:
        """Whether the engine itself can tell texts."""
        return not self.llm.llm_engine.model_config.skip_tokenizer_init

    @property
    def dtype(self) -> str:
        """What the model computes in."""
        return str(self.llm.llm_engine.model_config.dtype).removeprefix("torch.")

    @property
    def vocabulary(self) -> int:
        """How many token ids the model has."""
        return self.llm.llm_engine.model_config.get_vocab_size()

    # --- our plugin

    def call(self, name: str, *args: Any) -> list[Any]:
        """What each worker answers to one of our calls, in the order of their ranks."""
        with dying():
            return self.llm.collective_rpc(f"midstream_{name}", args=args)

    def release(self, ids: Sequence[str]) -> None:
        """The rows of some requests are not wanted any more."""
        self.call("release", list(ids))

    def stage(self, ids: Collection[str], file_of: Callable[[str], bytes]) -> None:
        """Hand over the tensors of a call that the workers have not yet, by id; file_of: an artifact's file."""
        if sum(self._staged.values()) > STAGED_BYTES and not set(ids) <= set(self._staged):
            self.call("unstage")
            self._staged.clear()
        for artifact_id in ids:
            if artifact_id not in self._staged:
                data = file_of(artifact_id)
                self.call("stage", artifact_id, data)
                self._staged[artifact_id] = len(data)

    @contextmanager
    def one_call(self) -> Generator[None]:
        """With the engine for one call alone: the outputs of two would be mixed."""
        if not self._busy.acquire(blocking=False):
            raise BusyError("this engine is busy with another call: exhaust or close its stream first")
        try:
            yield
        finally:
            self._busy.release()

    # --- requests

    def submit(self, request_id: str, prompt: Mapping[str, Any], params: Any) -> None:
        """Hand one request to the engine, under an id of ours; one of `refusals` where vLLM refuses it."""
        with dying():
            self.llm.llm_engine.add_request(request_id, dict(prompt), params, lora_request=self.lora)

    def step(self) -> list[Any]:
        """Run one step; what vLLM says of the requests that it was about. EngineError when the engine has died."""
        with dying():
            return self.llm.llm_engine.step()

    def abort(self, ids: Sequence[str]) -> None:
        """End requests in the middle; their rows are forgotten."""
        self.llm.llm_engine.abort_request(list(ids))
        self.release(ids)

    def close(self) -> None:
        """Free the engine and all that it holds in this process; of the caller's own, what it holds for us."""
        if self.llm is None:
            return
        if not self.own:
            with suppress(*refusals(), EngineError, RuntimeError):
                self.call("release", self.store.forget())
                self.call("unstage")
            self._staged.clear()
            return
        with suppress(*refusals(), EngineError, RuntimeError):  # one that has died says nothing
            self.call("close")
        _shut_down(self.llm)
        self.llm = None
        _clean_up()


def boot(model: str, options: Mapping[str, Any], settings: Mapping[str, Any], kept_bytes: int) -> Engine:
    """Boot an engine and put it to the self-test; ModelLoadError where it cannot be, with vLLM's own words.

    options: arguments of `vllm.LLM`. settings: what our plugin reads in `additional_config`. kept_bytes: of rows that
    are kept for reuse.
    """
    vllm = imported()
    additional = {**(options.get("additional_config") or {}), KEY: dict(settings)}
    lora = options.get("lora_request")
    given = {name: value for name, value in options.items() if name != "lora_request"}
    llm: Any = None
    with loading(model), _threads_kept():
        try:
            with boot_environment():
                llm = vllm.LLM(model=model, **{**given, "additional_config": additional})
            return _engine(llm, kept_bytes, lora)
        except Exception:
            if llm is not None:
                _shut_down(llm)
                llm = None
            _clean_up()
            raise


def adopted(llm: Any) -> Engine:
    """An engine that the caller made, with our plugin asked for, one for each; ModelLoadError where it was not."""
    imported()
    known = getattr(llm.llm_engine, _ADOPTED, None)
    if known is None:
        known = _engine(llm, 0, None, own=False)  # nobody tells us when its weights change
        setattr(llm.llm_engine, _ADOPTED, known)
    return known


def _engine(llm: Any, kept_bytes: int, lora: Any, *, own: bool = True) -> Engine:
    config = llm.llm_engine.vllm_config
    facts = getattr(llm.llm_engine, FACTS, None)
    if facts is None:
        raise ModelLoadError(
            "vLLM did not load our plugin: name `midstream` in VLLM_PLUGINS, or unset it"
            if settings_of(config) is not None
            else "this engine was not asked for taps: make it with additional_config={'midstream': {}}"
        )
    return Engine(llm, facts, RowStore(config.cache_config.block_size, kept_bytes), lora, own)


@contextmanager
def loading(model: str) -> Generator[None]:
    """What keeps vLLM from booting an engine, as ModelLoadError with its own words."""
    try:
        yield
    except Exception as error:  # vLLM raises this very class, where a process of its own has failed
        if isinstance(error, ModelLoadError) or not (type(error) is Exception or isinstance(error, _AT_BOOT)):
            raise
        said = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
        raise ModelLoadError(f"vLLM cannot serve {model!r}: {_telling(said)}") from error


def _telling(lines: Sequence[str]) -> str:
    """The line of an error that says what is wrong: pydantic's is its second."""
    found = next((line.strip() for line in lines if "error, " in line.lower()), lines[0].strip())
    return f"{found:.300}"


def imported() -> Any:
    """vLLM; ModelLoadError where it is not installed, or is one that this code was not written for."""
    try:
        import vllm
    except ImportError as error:
        message = f"vLLM is not installed here ({error}): install it beside midstream, or use backend='huggingface'"
        raise ModelLoadError(message) from None
    check_version(str(vllm.__version__))
    return vllm


def check_version(version: str, where: str = "") -> None:
    """ModelLoadError for a vLLM that this code was not written for. where: whose it is, if it is not here."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) != 2 or not TESTED[0] <= numbers < TESTED[1]:
        first, last = (".".join(map(str, one)) for one in TESTED)
        raise ModelLoadError(f"{where}vLLM {version} is not known here: install one from {first} to before {last}")


@contextmanager
def _threads_kept() -> Generator[None]:
    """vLLM on a CPU takes away the right to set torch's threads, and forgets to give it back."""
    setter, count = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = setter
        torch.set_num_threads(count)


def _shut_down(llm: Any) -> None:
    with suppress(AttributeError):  # one that failed half way lacks parts
        llm.llm_engine.engine_core.shutdown()


def _clean_up() -> None:
    """Free what an engine had in this process, once nobody holds it."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it refuses, or an engine that has died."""
    try:
        from vllm.exceptions import VLLMError
    except ImportError:  # before it had a class for them
        return (ValueError, TypeError)
    return (ValueError, TypeError, VLLMError)


@contextmanager
def refusing(index: int) -> Generator[None]:
    """What vLLM refuses of a prompt, as PromptError with its own words."""
    try:
        yield
    except SpecError:  # ours
        raise
    except refusals() as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise PromptError(f"prompt {index}: vLLM refuses it: {said[0]:.200}") from error
