"""AsyncVllmEngine: vLLM's asynchronous engine for a server, in whose process its client is; its core is in another."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import ExitStack, aclosing, suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

from midstream.backends.fingerprints import fingerprints
from midstream.backends.serving import Ended, Grown, ServedRequest
from midstream.core.backend import BackendSpec
from midstream.core.errors import EngineError
from midstream.core.generation import CONSTRAINT_KINDS, GenerationParams
from midstream.formats.artifacts import ArtifactRegistry
from midstream.formats.discovery import Model
from midstream.taps.pages import PAGES

from .arguments import Plan, check_options, planned
from .calls import Request
from .capabilities import engine_capabilities
from .checks import Checks, captured
from .engine import imported, loading, refusals, refusing
from .environment import apart_environment, boot_environment
from .facts import model_facts
from .liveness import dying
from .rendering import prompt_logprobs, sampling_params, token_logprobs
from .requests import KEY
from .routes.engine import AsyncEngine
from .routes.settling import Settling, Tapped
from .serving import Serving, reason_of

T = TypeVar("T")
_PATIENCE: Final = 20.0
"""Seconds for the engine's processes to end by themselves."""


@dataclass(frozen=True, eq=False)
class _Up:
    """An engine that is up. eos: every id that ends a text. at_a_time: requests in its batch, at most."""

    engine: AsyncEngine
    identity: Model
    settling: Settling
    eos: frozenset[int]
    lora: Any
    at_a_time: int


class AsyncVllmEngine(Serving):
    """A ServingEngine. spec: as of VllmBackend; what is of sessions alone (`kept_row_bytes`) has no effect here."""

    def __init__(self, spec: BackendSpec, tokenizer: Any = None, registry: ArtifactRegistry | None = None) -> None:
        check_options(spec)
        super().__init__(tokenizer, registry)
        self.spec = spec
        self._undo = ExitStack()
        self._booted: _Up | None = None
        self._ending = asyncio.Event()

    # --- up and down

    async def start(self) -> None:
        """Boot the engine, and put it to the self-test. ModelLoadError: it cannot be."""
        plan = await asyncio.to_thread(planned, self.spec, self._given_tokenizer, self._undo)
        booted: list[Any] = []  # an error that vLLM keeps holds the thread's frames, and what they return
        await asyncio.to_thread(_boot, plan, booted)
        client = booted.pop()
        try:
            with loading(plan.source):
                engine = await AsyncEngine.examined(client)
            await self._ready(engine, plan)
        except BaseException:
            await asyncio.to_thread(client.shutdown)
            raise

    async def _ready(self, engine: AsyncEngine, plan: Plan) -> None:
        config, found = engine.client.model_config, engine.facts
        facts = model_facts(config, self.spec.model, found.fingerprint)
        eos = frozenset(token for token in plan.eos if token < engine.vocabulary)
        prints = await asyncio.to_thread(fingerprints, config.hf_config, plan.source, plan.tokenizer)
        identity = Model(facts=asdict(facts), fingerprints=asdict(prints), eos=tuple(sorted(eos)))
        constraints = CONSTRAINT_KINDS if engine.has_tokenizer else ()
        capabilities = engine_capabilities(tuple(found.layouts), found.refused, constraints)
        at_a_time = engine.client.vllm_config.scheduler_config.max_num_seqs
        lora = plan.arguments.get("lora_request")
        self._tokenizer = plan.tokenizer
        self._known = Checks(engine, facts, lambda: capabilities, self.registry)
        self._booted = _Up(engine, identity, Settling(engine, config.dtype), eos, lora, at_a_time)
        engine.admission.open()

    async def close(self) -> None:
        """Give up what runs, and let the model go; idempotent."""
        self._closed = True
        self._ending.set()
        up, self._booted, self._known = self._booted, None, None
        if up is not None:
            await _end(up.engine)
            del up
            gc.collect()  # vLLM's objects hold one another, and cannot be taken apart when the process ends
        self._undo.close()
        PAGES.give_up()

    @property
    def identity(self) -> Model:
        """What a client of another process negotiates with: facts, fingerprints, and the ids that end a text."""
        return self._up.identity

    @property
    def counts(self) -> tuple[int, int]:
        """How many requests run, and how many wait for their place in the batch."""
        running = 0 if self._booted is None else min(len(self._asked), self._booted.at_a_time)
        return running, len(self._asked) - running

    @property
    def well(self) -> bool:
        """Whether the engine is up and lives."""
        return self._booted is not None and not self._booted.engine.client.errored

    # --- requests

    def check(self, request: ServedRequest) -> None:
        """SpecError or PromptError for what this model, or vLLM, cannot do, before anything runs."""
        asked = self._checks.served(request)
        up = self._up
        processor = up.engine.client.input_processor
        with refusing(0):
            params, prompt = self._sampling(asked, request.params), asked.job.engine_prompt
            processor.process_inputs(asked.id, prompt, params, supported_tasks=("generate",), lora_request=up.lora)

    async def _pieces(self, asked: Request, params: GenerationParams) -> AsyncGenerator[Grown | Ended]:
        up, ids = self._up, asked.job.ids
        engine = up.engine
        tapped: Tapped | None = None
        if asked.wishes:
            layouts = {} if asked.capture is None else captured(asked.capture, engine.facts)
            tapped = Tapped(asked.engine_request(params.max_tokens), asked.job.ops, layouts)
        artifacts = {} if tapped is None else tapped.artifacts
        generated: list[int] = []
        output: Any = None
        of_prompt: Any = None
        unread = tapped
        try:
            async with (
                engine.with_artifacts(artifacts, self.registry.file_of),
                aclosing(self._outputs(up, asked, params)) as outputs,
            ):
                async for output in outputs:
                    of_prompt = output.prompt_logprobs or of_prompt
                    new = tuple(output.outputs[0].token_ids)
                    generated += new
                    if new:
                        yield Grown(new, token_logprobs(output.outputs[0].logprobs, new, params.logprobs))
            reason = reason_of(output.outputs[0], params)
            of_prompt = prompt_logprobs(of_prompt, ids, params.prompt_logprobs)
            if tapped is None:
                yield Ended(reason, of_prompt, cached=output.num_cached_tokens or 0)
                return
            unread = None
            async with up.settling.settled(tapped, ids, generated) as settled:
                found = None if asked.capture is None else await up.settling.activations(tapped, settled)
            yield Ended(reason, of_prompt, settled.steering, found, settled.cached)
        finally:
            if unread is not None:
                engine.release(asked.id)

    async def _outputs(self, up: _Up, asked: Request, params: GenerationParams) -> AsyncGenerator[Any]:
        """What vLLM says of a request, each time what is new; closed, it is aborted."""
        sampling = self._sampling(asked, params)
        stream = up.engine.client.generate(asked.job.engine_prompt, sampling, asked.id, lora_request=up.lora)
        try:
            with dying():
                async with aclosing(stream):
                    # until its first output vLLM may not know the request yet, and could not tell it of an end
                    output = await self._before_end(anext(stream, None))
                    while output is not None:
                        yield output
                        output = await anext(stream, None)
        except EngineError:
            if self._closed:
                raise EngineError("this engine was closed") from None
            raise
        except refusals() as error:
            said = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise EngineError(f"vLLM failed at this request: {said[0]:.200}") from error

    async def _before_end(self, coming: Awaitable[T]) -> T:
        """What comes; EngineError where this engine is closed before."""
        coming, ending = asyncio.ensure_future(coming), asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait([coming, ending], return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                raise EngineError("this engine was closed")
            return coming.result()
        finally:
            ending.cancel()
            coming.cancel()
            await asyncio.wait([coming])

    def _sampling(self, asked: Request, params: GenerationParams) -> Any:
        job, up = asked.job, self._up
        return sampling_params(
            params,
            seed=job.seeds[0],
            eos=up.eos if job.constraint is None else up.eos | up.engine.grammar_eos,
            constraint=job.constraint,
            text=asked.text(params.max_tokens),
            delta=True,
        )

    @property
    def _up(self) -> _Up:
        if self._booted is None:
            raise EngineError("this engine was closed" if self._closed else "this engine is not up yet: start it")
        return self._booted


def _boot(plan: Plan, booted: list[Any]) -> None:
    """Add an AsyncLLM that has taps, and is closed to requests with wishes; ModelLoadError with vLLM's own words."""
    imported()
    with loading(plan.source), boot_environment(apart_environment):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        given = {name: value for name, value in plan.arguments.items() if name != "lora_request"}
        given = {**given, **_as_objects(given), "additional_config": {KEY: dict(plan.settings)}}
        arguments = AsyncEngineArgs(model=plan.source, **given)
        booted.append(AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER))


def _as_objects(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `vllm.LLM` takes as plain data, and its engine's arguments do not."""
    from vllm.config import CompilationConfig, StructuredOutputsConfig

    made: dict[str, Any] = {}
    if isinstance(structured := given["structured_outputs_config"], dict):
        made["structured_outputs_config"] = StructuredOutputsConfig(**structured)
    if isinstance(level := given.get("compilation_config"), int):
        made["compilation_config"] = CompilationConfig(mode=level)
    return made


async def _end(engine: AsyncEngine) -> None:
    """Let an engine's processes end; whoever waits for its tokens hears of it."""
    from vllm.v1.engine.exceptions import EngineDeadError

    client = engine.client
    client.output_processor.propagate_error(EngineDeadError())
    with suppress(Exception):  # one that has died, or failed, says whatever it says: it ends all the same
        await engine.close()
    if client.output_handler is not None:
        client.output_handler.cancel()
    await asyncio.to_thread(client.shutdown, _PATIENCE)
