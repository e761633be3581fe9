"""What an answer holds while it is sent: its place and its room, until the last byte is out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from midstream.core.backend import BackendSpec
from midstream.server.api import Api
from midstream.server.app import create_app
from midstream.server.asking import Served
from midstream.server.running import Where, api_for, named
from midstream.server.settings import Limits

ROWS = 6 + 4 - 1
"""Of `hello`, with its BOS, and four tokens after it."""


async def asked(api: Api, body: dict[str, Any], during: Callable[[], Awaitable[None]]) -> list[dict[str, Any]]:
    """The messages of one answer; `during` runs while the first bytes of its body are not taken."""
    sent: list[dict[str, Any]] = []
    gone = asyncio.Event()
    given = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if given:
            return given.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "http.response.body" and sum(one["type"] == message["type"] for one in sent) == 1:
            await during()

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
        "root_path": "", "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    await create_app(api)(scope, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_room_and_place_are_kept_until_the_answer_was_sent(tiny: Path, tmp_path: Path, stream: bool) -> None:
    async def run() -> None:
        from midstream.backends.huggingface.continuous.engine import EmbeddedEngine

        where = Where(data_dir=tmp_path)
        engine = EmbeddedEngine(BackendSpec("huggingface", str(tiny)), registry=where.registry())
        await engine.start()
        api = api_for(named([Served("tiny", engine)]), where, Limits(), where.registry())
        seen: list[tuple[int, int]] = []

        async def during() -> None:
            seen.append((api.held.nbytes, api.completing.places.taken))

        body = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": stream}
        try:
            sent = await asked(api, {**body, "capture": {"layers": [1]}}, during)
            assert sent[0]["status"] == 200
            assert b"activations" in b"".join(one.get("body", b"") for one in sent)
            assert seen == [(2 * ROWS * 32 * 4, 1)]
            assert (api.held.nbytes, api.completing.places.taken, api.completing.renewing) == (0, 0, set())
            assert api.ledger.budget("anonymous").held == 0
            assert api.ledger.budget("anonymous").spent == 6 + 4
        finally:
            await engine.close()
            api.database.close()

    asyncio.run(run())
