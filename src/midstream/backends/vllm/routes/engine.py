"""An engine that is asked from an event loop (vLLM's AsyncLLM), and the calls that its workers answer."""

# vLLM is in an environment of its own: type checkers do not see it
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

from midstream.core.artifacts import Artifact
from midstream.core.errors import EngineError

from ..engine import STAGED_BYTES
from ..facts import RUN, EngineFacts, examination, probes
from ..liveness import dying
from ..plugin.admission import ADMISSION, Admission
from ..requests import PROBE
from ..rows import Collected

_HEARTBEAT = 1.0
"""Seconds after which a call that waits looks whether the engine lives."""
_PAUSE = 0.1
"""Seconds before the next call, where one failed in an engine that lives."""


@dataclass(eq=False)
class AsyncEngine:
    """`client`, an AsyncLLM whose workers have taps. Made by `examined`."""

    client: Any
    facts: EngineFacts
    _asked: dict[str, asyncio.Future[list[Collected]]] = field(default_factory=dict[str, Any])
    _read: list[str] = field(default_factory=list[str])
    _exchanging: asyncio.Task[None] | None = None
    _closed: bool = False
    _staged: dict[str, int] = field(default_factory=dict[str, int])
    _users: dict[str, int] = field(default_factory=dict[str, int])
    _staging: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    async def examined(cls, client: Any) -> AsyncEngine:
        """Put an engine to the self-test; SelfTestError names what did not hold."""
        run, said = examination(), None
        try:
            while True:
                name, args = run.send(said)
                said = await _run_probes(client, *args) if name == RUN else await call(client, name, *args)
        except StopIteration as done:
            return cls(client, done.value)

    @property
    def vocabulary(self) -> int:
        """How many token ids the model has."""
        return self.client.model_config.get_vocab_size()

    @property
    def has_tokenizer(self) -> bool:
        """Whether the engine itself can tell texts."""
        return not self.client.model_config.skip_tokenizer_init

    @property
    def tokenizer(self) -> Any:
        """The engine's own, or None."""
        return self.client.get_tokenizer() if self.has_tokenizer else None

    @property
    def grammar_eos(self) -> frozenset[int]:
        """What its own tokenizer ends a text with, and so a grammar."""
        found = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset() if found is None else frozenset([found])

    @property
    def admission(self) -> Admission:
        """What is asked of every request on its way in."""
        return getattr(self.client.input_processor, ADMISSION)

    # --- rows

    async def collect(self, one: str) -> list[Collected]:
        """What every rank says of a request that has ended; its rows stay until `release`."""
        if self._closed:
            raise EngineError("the engine was closed, and its requests with it")
        future = asyncio.get_running_loop().create_future()
        self._asked[one] = future
        self._exchange()
        return await future

    def release(self, one: str) -> None:
        """The rows of a request have been read, or nobody will read them."""
        self._read.append(one)
        self._exchange()

    async def close(self) -> None:
        """Let the workers free all that they hold, once they have answered; nothing is asked of them any more."""
        self._closed = True
        if self._exchanging is not None:
            await self._exchanging
        await call(self.client, "close")

    def _exchange(self) -> None:
        if not self._closed and (self._exchanging is None or self._exchanging.done()):
            self._exchanging = asyncio.create_task(self._exchange_all())

    async def _exchange_all(self) -> None:
        """A call waits for a step to end: all that is asked meanwhile goes into the next one."""
        while self._asked or self._read:
            asked, read = self._asked, self._read
            self._asked, self._read = {}, []
            try:
                ranks = await call(self.client, "exchange", list(asked), read)
                parts = [Collected.read(data) for data in ranks]
            except Exception as error:  # whatever it is: whoever waits is told
                self._read = [*read, *self._read]
                for future in asked.values():
                    if not future.done():
                        future.set_exception(error)
                if self.client.errored or self._closed:
                    return
                await asyncio.sleep(_PAUSE)
                continue
            for place, future in enumerate(asked.values()):
                if not future.done():  # whoever asked has gone
                    future.set_result([_one(part, place) for part in parts])

    # --- artifacts

    @asynccontextmanager
    async def with_artifacts(
        self, artifacts: Mapping[str, Artifact], file_of: Callable[[Artifact], bytes]
    ) -> AsyncGenerator[None]:
        """While open, the workers have these artifacts, which are given by id. file_of: an artifact's file."""
        for one in artifacts:
            self._users[one] = self._users.get(one, 0) + 1
        try:
            if artifacts:
                async with self._staging:
                    await self._stage({one: of for one, of in artifacts.items() if one not in self._staged}, file_of)
            yield
        finally:
            for one in artifacts:
                self._users[one] -= 1
                if not self._users[one]:
                    del self._users[one]

    async def _stage(self, missing: Mapping[str, Artifact], file_of: Callable[[Artifact], bytes]) -> None:
        if missing and sum(self._staged.values()) > STAGED_BYTES:
            idle = [one for one in self._staged if one not in self._users]
            await call(self.client, "unstage", idle)
            for one in idle:
                del self._staged[one]
        for one, artifact in missing.items():
            data = await asyncio.to_thread(file_of, artifact)
            await call(self.client, "stage", one, data)
            self._staged[one] = len(data)


def _one(part: Collected, place: int) -> Collected:
    """One request's lines of what a rank said of several."""
    return replace(part.take(part.request == place, owner=0), described=[part.described[place]])


async def call(client: Any, name: str, *args: Any) -> list[Any]:
    """What each worker answers; EngineError where the engine dies meanwhile, of which vLLM tells no caller."""
    with dying():
        asked = asyncio.ensure_future(client.collective_rpc(f"midstream_{name}", args=args))
        while not (await asyncio.wait([asked], timeout=_HEARTBEAT))[0]:
            if client.errored:
                asked.cancel()
                raise EngineError("the engine has died, and its requests with it")
        return asked.result()


async def _run_probes(client: Any, max_tokens: int) -> None:
    prompts, params = probes(client.model_config.get_vocab_size(), max_tokens)

    async def one(prompt: dict[str, Any]) -> None:
        async for _ in client.generate(prompt, params, f"{PROBE}{uuid4().hex}"):
            pass

    await asyncio.gather(*map(one, prompts))
