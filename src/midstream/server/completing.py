"""Completions as they run: a place, tokens held, room for what is captured, then the engine; each let go of once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anyio
from anyio import to_thread

from midstream.backends.serving import Ended, Grown
from midstream.core.errors import CaptureError, MidstreamError
from midstream.formats.activations import Activations
from midstream.formats.held import Held

from .answers import DONE, Answers, Inline, event
from .asking import Ask
from .choices import Choice
from .errors import ApiError, refusal
from .ledger import Ledger, Usage
from .settings import Limits

_INLINE: Final = 2
"""What activations inside an answer take, in sizes of the rows: as rows, and compressed."""


class Places:
    """How many requests there are of each key and in all; what is too many is refused at once."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._of: dict[str, int] = {}
        self.taken = 0

    @asynccontextmanager
    async def one(self, key_id: str) -> AsyncIterator[None]:
        """A place while open; 429 where there is none."""
        mine = self._of.get(key_id, 0)
        if self.taken >= self._limits.waiting:
            raise ApiError(429, f"{self.taken} requests are here, as many as are taken: come again", after=1.0)
        if mine >= self._limits.running:
            raise ApiError(429, f"{mine} requests of this key are here, as many as one may have: come again", after=1.0)
        self.taken += 1
        self._of[key_id] = mine + 1
        try:
            yield
        finally:
            self.taken -= 1
            self._of[key_id] -= 1
            if not self._of[key_id]:
                del self._of[key_id]


@dataclass(eq=False)
class Paying:
    """Tokens held for one request: paid or freed once, whatever happens."""

    ledger: Ledger
    hold_id: str
    open: bool = True

    async def settle(self, paid: int, usage: Usage) -> None:
        """Pay for what was used."""
        await self._end(lambda: self.ledger.settle(self.hold_id, paid, usage))

    async def free(self) -> None:
        """Pay nothing."""
        await self._end(lambda: self.ledger.free(self.hold_id))

    async def _end(self, how: Callable[[], bool]) -> None:
        if self.open:
            self.open = False
            with anyio.CancelScope(shield=True):  # whoever asked may be gone: the tokens are not
                await to_thread.run_sync(how)


@dataclass(eq=False)
class Completing:
    """What completions run with. renewing: holds whose leases are kept."""

    ledger: Ledger
    held: Held
    limits: Limits
    places: Places
    renewing: set[str] = field(default_factory=set[str])

    @asynccontextmanager
    async def running(self, ask: Ask, key_id: str) -> AsyncIterator[tuple[Run, Paying]]:
        """A place, the tokens and the room of a request while open; ApiError where one of them is not to be had."""
        async with self.places.one(key_id):
            held = ask.tokens_held
            hold = await to_thread.run_sync(lambda: self.ledger.hold(key_id, held, f"completion {ask.id}"))
            self.renewing.add(hold)
            paying = Paying(self.ledger, hold)
            try:
                async with self._room(ask) as room:
                    yield Run(ask, room), paying
            finally:
                self.renewing.discard(hold)
                await paying.free()

    @asynccontextmanager
    async def _room(self, ask: Ask) -> AsyncIterator[_Room]:
        """Memory for what a request captures; 429 where there is none for a while."""
        binary = ask.asked is not None and ask.asked.binary
        room = _Room(self.held, ask.rows * ask.row_bytes * (1 if binary else _INLINE))
        if room.bytes:
            try:
                await asyncio.wait_for(self.held.take(room.bytes), self.limits.wait_seconds)
            except TimeoutError:
                message = f"no room for {room.bytes:,} bytes of activations: come again, or capture fewer rows"
                raise ApiError(429, message, after=self.limits.wait_seconds) from None
            except CaptureError as error:  # there never will be
                raise ApiError(400, str(error), "capture") from error
        try:
            yield room
        finally:
            with anyio.CancelScope(shield=True):
                await room.give_up()


@dataclass(eq=False)
class _Room:
    held: Held
    bytes: int

    async def give_up(self) -> None:
        if self.bytes:
            taken, self.bytes = self.bytes, 0
            await self.held.give_up(taken)

    async def keep(self, found: Activations) -> list[str]:
        """Fill it with tensors that wait; a handle for each."""
        taken, self.bytes = self.bytes, 0
        return await self.held.keep([stack.tensor for stack in found.stacks], taken)


class Run:
    """One request on its engine."""

    def __init__(self, ask: Ask, room: _Room) -> None:
        self.ask, self._room = ask, room
        self.answers = Answers(ask)
        tokenizer, by_id = ask.served.engine.tokenizer, bool(ask.body.return_tokens_as_token_ids)
        self.choices = [Choice(index, of, tokenizer, by_id=by_id) for index, of in enumerate(ask.requests)]

    @property
    def used(self) -> int:
        """Tokens: of the prompts, if anything came, and all that came."""
        said = sum(len(one.token_ids) for one in self.choices)
        return self.ask.prompt_tokens + said if said else 0

    @property
    def usage(self) -> Usage:
        """What was done for it."""
        said = sum(len(one.token_ids) for one in self.choices)
        rows = nbytes = 0
        if (found := self.activations) is not None:
            rows, nbytes = len(found.position), sum(stack.tensor.nbytes for stack in found.stacks)
        return Usage(1, self.ask.prompt_tokens if said else 0, said, rows, nbytes)

    @property
    def activations(self) -> Activations | None:
        """What was captured."""
        ended = self.choices[0].ended
        return None if ended is None or not self.ask.captures else ended.activations

    async def whole(self) -> Iterator[bytes]:
        """The answer in one piece of JSON, a little at a time."""
        async for one, news in self._events():
            one.note(news)
        body = self.answers.whole(self.choices)
        inline: Inline | None = None
        if (found := self.activations) is not None:
            body["activations"], inline = await self._answered(found)
        text = json.dumps(body, separators=(",", ":"))
        return iter([text.encode()]) if inline is None else inline.pieces(text)

    async def stream(self) -> AsyncIterator[bytes]:
        """The same as the events of a stream. An error is its last event, or raised where it is the first."""
        answers, begun, sent = self.answers, False, False
        try:
            async for one, news in self._events():
                if not begun:
                    begun = True
                    for text in answers.begin(self.choices):
                        sent = True
                        yield text.encode()
                text = one.grow(news)
                ids, logprobs = (news.token_ids, news.logprobs or ()) if isinstance(news, Grown) else ((), ())
                if (said := answers.piece(one, text, ids, logprobs)) is not None:
                    sent = True
                    yield said.encode()
            if answers.include_usage:
                yield answers.chunk([], usage=answers.usage(self.choices)).encode()
            async for piece in self._last():
                yield piece
        except MidstreamError as error:
            if not sent:
                raise
            yield event(refusal(error).body()).encode()
            return
        yield DONE.encode()

    async def _last(self) -> AsyncIterator[bytes]:
        """The event that has the activations, and what was done."""
        added = self.answers.added(self.choices)
        if (found := self.activations) is not None:
            plain, inline = await self._answered(found)
            text = self.answers.chunk([], **added, activations=plain)
            for piece in inline.pieces(text) if inline is not None else [text.encode()]:
                yield piece
        elif added:
            yield self.answers.chunk([], **added).encode()

    async def _answered(self, found: Activations) -> tuple[dict[str, Any], Inline | None]:
        """Activations in the form and by the way that was asked for."""
        asked = self.ask.asked
        assert asked is not None
        if asked.binary:
            handles = await self._room.keep(found)
            return found.residual(handles) if asked.residual else found.plain(handles), None
        inline = await to_thread.run_sync(lambda: Inline.of(found, residual=asked.residual))
        return inline.plain, inline

    async def _events(self) -> AsyncIterator[tuple[Choice, Grown | Ended]]:
        """What the engine says of each choice, as it comes; MidstreamError ends all of them."""
        if len(self.choices) == 1:
            (one,) = self.choices
            async with _closing(self.ask.served.engine.run(one.request)) as pieces:
                async for piece in pieces:
                    yield one, piece
            return
        queue: asyncio.Queue[tuple[Choice, Any]] = asyncio.Queue()
        tasks = [asyncio.create_task(self._pump(one, queue)) for one in self.choices]
        try:
            left = len(tasks)
            while left:
                one, news = await queue.get()
                if isinstance(news, BaseException):
                    raise news
                left -= isinstance(news, Ended)
                yield one, news
        finally:
            for task in tasks:
                task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, one: Choice, queue: asyncio.Queue[tuple[Choice, Any]]) -> None:
        try:
            async with _closing(self.ask.served.engine.run(one.request)) as pieces:
                async for piece in pieces:
                    queue.put_nowait((one, piece))
        except Exception as error:  # whoever reads the queue raises it
            queue.put_nowait((one, error))


@asynccontextmanager
async def _closing(pieces: AsyncIterator[Any]) -> AsyncIterator[AsyncIterator[Any]]:
    """A generator that is closed on the way out, which gives its request up."""
    try:
        yield pieces
    finally:
        with anyio.CancelScope(shield=True):
            await pieces.aclose()  # pyright: ignore[reportAttributeAccessIssue]  # an async generator
