"""Hundreds of requests at once, a third of them given up: no wrong row, no tokens lost, no memory that grows."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from torch import Tensor

import midstream as ms
from midstream.formats.spec_json import encode_spec
from midstream.formats.wire import decode_tensor
from server.kit import Serve
from server.test_completions import close, steers
from server.test_keys_and_jobs import Keyed
from server.test_refusals import metric

REQUESTS, ROUNDS = 240, 3
PROMPTS = [f"prompt {place} " * (1 + place % 4) for place in range(12)]
SPECS = [None, *steers().values()]


def due(lm: ms.LanguageModel) -> dict[tuple[int, int], tuple[str | None, dict[int, Tensor]]]:
    """What each prompt says under each steer, and its rows: computed once, one by one."""
    found: dict[tuple[int, int], tuple[str | None, dict[int, Tensor]]] = {}
    for place, prompt in enumerate(PROMPTS):
        for which, spec in enumerate(SPECS):
            cap = lm.capture([prompt], max_tokens=8, ignore_eos=True, steering=spec or False)
            found[place, which] = (cap.outputs[0].text, {layer: cap.rows(layer) for layer in range(4)})
    return found


async def storm(server: Serve, key: str, truth: Any, seed: int) -> tuple[int, int]:
    """How many were answered rightly, and the tokens that those used."""
    dice = random.Random(seed)
    headers = {"authorization": f"Bearer {key}"}
    limits = httpx2.Limits(max_connections=REQUESTS)
    async with httpx2.AsyncClient(base_url=server.url, headers=headers, timeout=300, limits=limits) as client:

        async def one(give_up: float | None, place: int, which: int, layers: list[int], mode: int) -> int:
            spec = SPECS[which]
            body: dict[str, Any] = {"prompt": PROMPTS[place], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            body |= {} if spec is None else {"steering": encode_spec(spec)}
            body |= {} if mode == 0 else {"output_residual_stream": layers}
            body |= {"activations_transport": "binary"} if mode == 2 else {}
            try:
                async with asyncio.timeout(give_up):
                    answer = await client.post("/v1/completions", json=body)
            except TimeoutError:
                return 0
            assert answer.status_code == 200, answer.text
            found = answer.json()
            text, rows = truth[place, which]
            assert found["choices"][0]["text"] == text
            if mode:
                held = found["activations"]["residual_stream"]
                if mode == 2:
                    got = (
                        await client.get(f"/v1/activations/{held['handle']}", params={"compression": "none"})
                    ).content
                    assert len(got) == held["nbytes"]
                    import torch

                    tensor = torch.frombuffer(bytearray(got), dtype=torch.float32).reshape(held["shape"])
                else:
                    tensor = decode_tensor(held)
                for place_in, layer in enumerate(layers):
                    assert close(tensor[place_in], rows[layer])
            return found["usage"]["total_tokens"]

        tasks = []
        for _ in range(REQUESTS):
            layers = sorted(dice.sample(range(4), dice.randint(1, 4)))
            give_up = dice.uniform(0.01, 2.0) if dice.random() < 1 / 3 else None
            what = (give_up, dice.randrange(len(PROMPTS)), dice.randrange(len(SPECS)), layers, dice.randrange(3))
            tasks.append(asyncio.create_task(one(*what)))
        used = await asyncio.gather(*tasks)
    return sum(1 for tokens in used if tokens), sum(used)


@pytest.mark.slow
def test_a_storm(tiny: Path, tmp_path: Path, lm: ms.LanguageModel) -> None:
    keyed = Keyed(tiny, tmp_path / "storm", "--limit", "running=1000")
    truth, sizes = due(lm), []
    try:
        keyed.server.start()
        process = psutil.Process(keyed.server.pid)
        with keyed.client("all") as client:
            for turn in range(ROUNDS):
                before = client.get("/v1/budget").json()["spent"]
                answered, used = asyncio.run(storm(keyed.server, keyed.made["all"]["secret"], truth, turn))
                assert answered >= REQUESTS // 2
                until = time.monotonic() + 60
                while (budget := client.get("/v1/budget").json())["held"]:
                    assert time.monotonic() < until, budget
                    time.sleep(0.1)
                # whoever left as the answer was written has paid for it
                assert used <= budget["spent"] - before <= used + 40 * (REQUESTS - answered)
                sizes.append(process.memory_info().rss)
        assert metric(keyed.server, "midstream_open_holds") == 0
        assert metric(keyed.server, "midstream_requests_here") == 0
        assert sizes[-1] < sizes[0] * 1.25, sizes
    finally:
        keyed.server.close()


@pytest.mark.slow
def test_what_does_not_fit_waits_or_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Two captures that wait for whoever asked fill the room: a third waits, is refused, and has room once they go."""
    arguments = ["--model", str(tiny), "--limit", "held_bytes=200000", "--limit", "wait_seconds=1"]
    server = Serve(tmp_path / "small", [*arguments, "--limit", "held_seconds=8"])
    # 150 rows of 4 layers × 32 numbers of 4 bytes
    given = {"prompt": "hello " * 20, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "capture": {}}
    try:
        server.start()
        with server.client() as client:
            for _ in range(2):
                held = client.post("/v1/completions", json={**given, "activations_transport": "binary"})
                assert held.status_code == 200
            assert metric(server, "midstream_held_bytes") == 2 * 150 * 4 * 32 * 4
            error = client.post("/v1/completions", json=given)
            assert error.status_code == 429
            assert int(error.headers["retry-after"]) >= 1
            until = time.monotonic() + 30
            while (answer := client.post("/v1/completions", json=given)).status_code == 429:
                assert time.monotonic() < until
            assert answer.status_code == 200

        async def run() -> list[int]:
            async with httpx2.AsyncClient(base_url=server.url, timeout=120) as client:
                answers = await asyncio.gather(*(client.post("/v1/completions", json=given) for _ in range(40)))
            return [one.status_code for one in answers]

        found = asyncio.run(run())
        assert set(found) <= {200, 429}
        assert 200 in found
        assert metric(server, "midstream_held_bytes") == 0
    finally:
        server.close()
