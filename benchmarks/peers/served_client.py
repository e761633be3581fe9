"""A client of one server, asked in turn: one JSON object per line, a request on stdin, its answer on stdout.

    python peers/served_client.py plain|midstream|api|engine|lens URL PROMPTS THREADS

    {"do": "run", "subject": "one layer"}  ->  {"wall": 1.9, "cpu": 0.7, "rows": 9152}
    {"do": "rows", "subject": "all layers", "file": "…", "prompts": [3, 7]}  ->  tensors "<prompt>.<layer>" in the file

Each run sends every prompt, CONCURRENCY at a time, and has its rows as tensors at the end. `cpu` is the client's alone.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from protocol import answer, stdout_for_answers_only
from safetensors.torch import save_file

CONCURRENCY, NEW_TOKENS, MIDDLE = 16, 16, 15
ALONE = 8
"""Prompts that are sent one by one."""
LONG, DELIVERED = 1024, 4
"""Of the requests whose activations are delivered: tokens of each, and how many."""

Rows = dict[int, list[torch.Tensor]]


class Client:
    """One of a kind. subjects: what can be asked, and what it gives: rows, layer → one tensor per prompt."""

    def __init__(self, kind: str, url: str, prompts: list[list[int]]) -> None:
        self.url, self.prompts = url, prompts
        self.subjects: dict[str, Callable[[], Rows]] = {}
        getattr(self, f"_{kind}")()

    # --- plain completions, over the same HTTP as midstream's client

    def _plain(self) -> None:
        self.subjects["generate"] = self._completed

    def _completed(self) -> Rows:
        asyncio.run(self._complete_all())
        return {}

    async def _complete_all(self) -> None:
        from midstream.backends.vllm.serve.options import ServeOptions
        from midstream.backends.vllm.serve.transport import Server

        server, room = Server(self.url, ServeOptions(base_url=(self.url,)), None), asyncio.Semaphore(CONCURRENCY)

        async def one(ids: list[int]) -> None:
            body = {"prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
            async with room:
                await server.json("POST", "/v1/completions", body)

        await asyncio.gather(*map(one, self.prompts))
        await server.close()

    # --- midstream

    def _midstream(self) -> None:
        import midstream as ms

        self.lm = ms.load(None, backend="vllm-serve", base_url=self.url, max_concurrency=CONCURRENCY)
        self.subjects |= {
            "idle generate": self._completed,
            "one layer": lambda: self._captured([MIDDLE]),
            "all layers": lambda: self._captured(None),
        }

    def _captured(self, layers: list[int] | None) -> Rows:
        cap = self.lm.capture(self.prompts, layers=layers, max_tokens=NEW_TOKENS, ignore_eos=True)
        return {layer: [cap.sample(i)[layer] for i in range(len(self.prompts))] for layer in cap.layer_ids}

    def deliver(self) -> dict[str, float]:
        """The time to fetch what a server holds, of which nothing has to be computed any more."""
        from midstream.backends.vllm.serve.options import ServeOptions
        from midstream.backends.vllm.serve.transport import Server
        from midstream.formats.activations import held_tensors

        joined = [token for ids in self.prompts for token in ids]

        async def run() -> dict[str, float]:
            server = Server(self.url, ServeOptions(base_url=(self.url,), request_timeout=600), None)
            held = []
            for place in range(DELIVERED):
                body = {"prompt": joined[place : place + LONG], "max_tokens": 1, "temperature": 0, "capture": {},
                        "activations_transport": "binary"}  # fmt: skip
                held += held_tensors((await server.json("POST", "/v1/completions", body))["activations"])
            begun, cpu = time.perf_counter(), time.process_time()
            tensors = [await server.tensor(one) for one in held]
            wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
            await server.close()
            return {"wall": wall, "cpu": cpu, "rows": sum(one.nbytes for one in tensors) / 1e6}

        return asyncio.run(run())

    # --- midstream serve, over plain HTTP; and its engine without a server

    def _api(self) -> None:
        self.subjects |= {
            "one by one": lambda: self._asked({}, concurrency=1, prompts=ALONE),
            "generate": lambda: self._asked({}),
            "one layer": lambda: self._asked({"output_residual_stream": [MIDDLE]}),
            "one layer, by handle": lambda: self._asked(
                {"output_residual_stream": [MIDDLE], "activations_transport": "binary"}
            ),
            "all layers, by handle": lambda: self._asked(
                {"output_residual_stream": True, "activations_transport": "binary"}
            ),
        }

    def _asked(self, more: dict[str, Any], concurrency: int = CONCURRENCY, prompts: int | None = None) -> Rows:
        return asyncio.run(self._ask_all(more, concurrency, prompts or len(self.prompts)))

    async def _ask_all(self, more: dict[str, Any], concurrency: int, prompts: int) -> Rows:
        import httpx2

        from midstream.formats.activations import HeldTensor
        from midstream.formats.wire import decode_tensor

        room, rows = asyncio.Semaphore(concurrency), [torch.empty(0)] * len(self.prompts)
        limits = httpx2.Limits(max_connections=concurrency)
        async with httpx2.AsyncClient(base_url=self.url, timeout=600, limits=limits) as client:

            async def one(place: int) -> None:
                body = {"prompt": self.prompts[place], "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
                async with room:
                    answer = (await client.post("/v1/completions", json=body | more)).raise_for_status().json()
                    found = answer.get("activations", {}).get("residual_stream")
                    if found is None:
                        return
                    if "data" in found:
                        rows[place] = decode_tensor(found)
                        return
                    held = HeldTensor.of(found)
                    path, none = f"/v1/activations/{held.handle}", {"compression": "none"}
                    data = (await client.get(path, params=none, headers={"accept-encoding": "identity"})).content
                    rows[place] = torch.frombuffer(bytearray(data), dtype=held.torch_dtype).view(held.shape)
                    await client.delete(path)

            await asyncio.gather(*map(one, range(prompts)))
        layers = more.get("output_residual_stream")
        if layers is None:
            return {}
        layers = list(range(len(rows[0]))) if layers is True else layers
        return {layer: [of[place] for of in rows] for place, layer in enumerate(layers)}

    def _engine(self) -> None:
        from midstream.backends.bundled import smollm2_path
        from midstream.backends.huggingface.continuous.engine import EmbeddedEngine
        from midstream.core.backend import BackendSpec

        self.loop = asyncio.new_event_loop()
        self.engine = EmbeddedEngine(BackendSpec("huggingface", str(smollm2_path())))
        self.loop.run_until_complete(self.engine.start())
        self.subjects["engine"] = lambda: self.loop.run_until_complete(self._run_all())

    async def _run_all(self) -> Rows:
        from midstream.backends.serving import ServedRequest
        from midstream.core.generation import GenerationParams
        from midstream.core.prompts import PreparedPrompt

        params = GenerationParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        room = asyncio.Semaphore(CONCURRENCY)

        async def one(ids: list[int]) -> None:
            async with room:
                async for _ in self.engine.run(ServedRequest(PreparedPrompt(tuple(ids)), params)):
                    pass

        await asyncio.gather(*map(one, self.prompts))
        return {}

    # --- vllm-lens

    def _lens(self) -> None:
        from vllm_lens.client import VLLMLensClient

        self.client = VLLMLensClient(self.url)
        depth = 30
        self.subjects |= {
            "one layer": lambda: self._residuals([MIDDLE]),
            "all layers": lambda: self._residuals(list(range(depth))),
        }

    def _residuals(self, layers: list[int]) -> Rows:
        from vllm_lens import decode_activations

        decoding = Lock()  # the client has one decompressor for all threads, which two at a time crash
        self.client._session.close()  # connections of the run before, which the server may have given up meanwhile

        def one(ids: list[int]) -> torch.Tensor:
            xargs = {"output_residual_stream": json.dumps(layers), "activations_transport": "binary"}
            body = {"model": self.client.model, "prompt": ids, "max_tokens": NEW_TOKENS, "temperature": 0,
                    "ignore_eos": True, "vllm_xargs": xargs}  # fmt: skip
            found = self.client._session.post(f"{self.url}/v1/completions", json=body).json()
            handle = found["activations"]["residual_stream"]["handle"]
            data = self.client._fetch_activation_bytes(handle)
            with decoding:
                return decode_activations(found, fetch_bytes=lambda _: data)["residual_stream"]

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            stacked = list(pool.map(one, self.prompts))
        return {layer: [rows[place] for rows in stacked] for place, layer in enumerate(layers)}


def main() -> None:
    kind, url, prompts, threads = sys.argv[1:]
    answers = stdout_for_answers_only()
    torch.set_num_threads(int(threads))
    client = Client(kind, url, json.loads(Path(prompts).read_text()))
    own = {"lens": ("vllm-lens",)}.get(kind, ("midstream",))
    subjects = [*client.subjects, *(["delivery"] if kind == "midstream" else [])]
    versions = {name: version(name) for name in (*own, "torch")}
    answer(answers, {"ready": kind, "subjects": subjects, "versions": versions})
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if request["subject"] == "delivery":
            answer(answers, client.deliver())
            continue
        run = client.subjects[request["subject"]]
        count = ALONE if request["subject"] == "one by one" else len(client.prompts)
        begun, cpu = time.perf_counter(), time.process_time()
        rows = run()
        wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
        if request["do"] == "run":
            answer(answers, {"wall": wall, "cpu": cpu, "rows": count * (128 + NEW_TOKENS - 1)})
        else:
            # of the prompt alone: what follows it is the tool's own text
            found = {
                f"{i}.{layer}": of[i][: len(client.prompts[i])].contiguous()
                for layer, of in rows.items()
                for i in request["prompts"]
            }
            save_file(found, request["file"])
            answer(answers, {"saved": request["file"]})


if __name__ == "__main__":
    main()
