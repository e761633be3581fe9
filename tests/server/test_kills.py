"""kill −9 in the middle of holds, jobs and uploads: after a restart every figure adds up."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.kit import Serve
from server.test_keys_and_jobs import Keyed, done

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


async def rush(server: Serve, key: str, jobs: list[str], seconds: float) -> None:
    """Every kind of work at once, and a kill in the middle of it."""
    headers = {"authorization": f"Bearer {key}"}
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=30) as client:

        async def plain(place: int) -> None:
            body = {
                "prompt": f"plain {place}",
                "max_tokens": 5 + place,
                **GREEDY,
                "output_residual_stream": [place % 4],
            }
            await client.post("/v1/completions", json=body)

        async def stream(place: int) -> None:
            body = {"prompt": f"stream {place}", "max_tokens": 80, **GREEDY, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    pass

        async def job(place: int) -> None:
            body = {"prompt": f"job {place}", "max_tokens": 20, **GREEDY, "output_residual_stream": [1]}
            answer = await client.post("/v1/jobs", json={"body": body})
            if answer.status_code == 202:
                jobs.append(answer.json()["id"])

        async def upload(place: int) -> None:
            content = io.BytesIO(json.dumps({"custom_id": "a"}).encode() * 200_000)
            await client.post("/v1/files", files={"file": (f"{place}.jsonl", content)}, data={"purpose": "batch"})

        async def one(what: Any) -> None:
            with contextlib.suppress(httpx2.HTTPError):
                await what

        work = [one(kind(place)) for place in range(4) for kind in (plain, stream, job, upload)]
        tasks = [asyncio.create_task(each) for each in work]
        await asyncio.sleep(seconds)
        server.kill()
        await asyncio.gather(*tasks)


@pytest.mark.slow
def test_every_figure_adds_up_after_kills(tiny: Path, tmp_path: Path) -> None:
    keyed = Keyed(tiny, tmp_path / "killed")
    server, secret = keyed.server, keyed.made["all"]["secret"]
    jobs: list[str] = []
    dice = random.Random(5)
    try:
        for _ in range(5):
            server.start()
            asyncio.run(rush(server, secret, jobs, dice.uniform(0.05, 1.5)))
        server.start()
        with keyed.client("all") as client:
            ended = [done(client, job) for job in jobs]
            assert jobs
            assert {job["status"] for job in ended} == {"done"}
            paid = 0
            for job in jobs:
                result = client.get(f"/v1/jobs/{job}/result").json()
                assert len(result["choices"]) == 1
                assert "activations" in result
                paid += result["usage"]["total_tokens"]
            until = time.monotonic() + 30
            while (budget := client.get("/v1/budget").json())["held"]:  # the leases of the dead
                assert time.monotonic() < until, budget
                time.sleep(0.2)
            usage = client.get("/v1/usage").json()
            assert budget["spent"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert budget["spent"] >= paid
            listed = client.get("/v1/files").json()["data"]
        contents = {path.name for path in (keyed.data_dir / "files").iterdir()}
        assert {one["id"] for one in listed} <= contents
        assert not [name for name in contents if name.startswith(".")]
    finally:
        server.close()
