"""The speed of `midstream serve`: against its own engine without a server, and vllm-lens' server. All in one run.

    python benchmarks/api.py                      the published run: 32 prompts of 128 tokens, 9 repetitions
    python benchmarks/api.py --small

The servers are the embedded engine (from this environment), `--backend vllm` (from .venv-vllm), and a `vllm serve` with
vllm-lens. Writes build/benchmarks/api.json for publish.py.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from capture import RESULTS, environment_facts, tell
from engines import VLLM_PYTHON, lens_python
from environments import Unavailable
from measure import Timing, take_turns
from prompts import make_prompts
from reference import plain_rows, row_error
from servers import ClientProcess, ServerProcess, free_port
from serving import Settings, server_process

from midstream.backends.bundled import smollm2_path
from midstream.core.capture import CaptureReceipt
from midstream.formats.activations import Activations, Stack
from midstream.formats.wire import tensor_bytes

KINDS = {"api": "api", "engine": "engine", "vllm": "api", "lens": "lens"}
"""Name → the kind of its client. `engine` needs no server."""
ROWS = 1024


def api_process(backend: str, python: Path, scratch: Path, threads: int) -> ServerProcess:
    """A `midstream serve`."""
    port = free_port()
    engine = {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 28, "max_num_batched_tokens": 2048,
              "max_num_seqs": 64, "enforce_eager": True, "enable_prefix_caching": False}  # fmt: skip
    more = ["--engine", json.dumps(engine)] if backend == "vllm" else []
    data = scratch / f"data-{backend}"
    command = [python, "-c", "from midstream.cli import main; main()", "serve", "--model", smollm2_path(),
               "--backend", backend, "--port", port, "--data-dir", data, *more]  # fmt: skip
    variables = {"MIDSTREAM_LOG_LEVEL": "WARNING", "VLLM_LOGGING_LEVEL": "WARNING"}
    if backend == "huggingface":
        variables["OMP_NUM_THREADS"] = str(threads)
    return ServerProcess(f"serve-{backend}", command, port, scratch, variables)


def transports() -> dict[str, Timing]:
    """What the server does to answer with all layers of one long prompt: inside JSON, and as bytes. rows: megabytes."""
    from midstream.server.answers import Inline

    rows = torch.randn(30, ROWS, 576).bfloat16()
    zeros = torch.zeros(ROWS, dtype=torch.int64).numpy()
    found = Activations([Stack("resid_post", tuple(range(30)), rows)], zeros, zeros, zeros > 0, CaptureReceipt(0, 0))

    def inside() -> None:
        inline = Inline.of(found, residual=True)
        for _ in inline.pieces(json.dumps({"activations": inline.plain})):
            pass

    def plain() -> None:
        data = tensor_bytes(rows)
        for start in range(0, len(data), 1 << 20):
            bytes(data[start : start + (1 << 20)])

    timings: dict[str, Timing] = {}
    for name, work in (("transport: base64", inside), ("transport: bytes", plain)):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        timings[name] = Timing(wall, cpu, round(rows.nbytes / 1e6))
    return timings


def main() -> None:
    settings = _read_arguments()
    torch.set_num_threads(settings.threads)
    RESULTS.mkdir(parents=True, exist_ok=True)
    out = RESULTS / f"api{'-small' * settings.small}.json"
    figures: dict[str, Any] = {"settings": asdict(settings), "versions": environment_facts(), "skipped": {}}
    joined = [token for ids in make_prompts(smollm2_path(), 256) for token in ids]
    size = settings.tokens
    prompts = [joined[i * size : (i + 1) * size] for i in range(settings.prompts)]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = scratch / "prompts.json"
        file.write_text(json.dumps(prompts))
        runs: dict[str, Callable[[], Timing]] = {}
        clients: dict[str, ClientProcess] = {}
        servers: dict[str, ServerProcess] = {}
        for name, kind in KINDS.items():
            tell(f"{name}: booting")
            try:
                python = lens_python(settings.torch) if name == "lens" else Path(sys.executable)
                if name == "lens":
                    servers[name] = server_process("lens", python, scratch)
                elif name != "engine":  # which is a client without a server; that of the API stands by
                    backend, own = ("vllm", VLLM_PYTHON) if name == "vllm" else ("huggingface", python)
                    servers[name] = api_process(backend, own, scratch, settings.threads)
                server = servers.get(name, servers["api"])
                if name in servers:
                    stack.callback(server.close)
                clients[name] = ClientProcess(kind, server, python, file, settings.threads, scratch)
            except Unavailable as reason:
                tell(f"{name}: skipped: {reason}")
                figures["skipped"][name] = str(reason)
                continue
            stack.callback(clients[name].close)
            figures["versions"] |= clients[name].versions
            subjects = [one for one in clients[name].subjects if name != "vllm" or one != "one by one"]
            runs |= {f"{name}: {of}": functools.partial(clients[name].run, of) for of in subjects}
        figures["errors"] = _errors(clients, prompts)
        timings: dict[str, list[Timing]] = {}
        for run in runs.values():  # warm
            run()
        transports()
        for turn in range(settings.repetitions):
            for name, timing in (*take_turns(runs, turn), *transports().items()):
                timings.setdefault(name, []).append(timing)
                tell(f"repetition {turn + 1} of {settings.repetitions}: {name}: {timing.wall:.2f} s")
            given = {name: [asdict(one) for one in of] for name, of in timings.items()}
            out.write_text(json.dumps(figures | {"timings": given}, indent=1) + "\n")
    tell(f"figures are in {out}")


def _errors(clients: dict[str, ClientProcess], prompts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Each server's rows of some prompts beside the float32 reference's; `plain`: transformers' own in bfloat16."""
    checked = list(range(0, len(prompts), max(1, len(prompts) // 6)))
    given = (smollm2_path(), prompts, checked)
    reference = plain_rows(*given, torch.float32, attn_implementation="eager")
    found = {"plain": asdict(row_error(plain_rows(*given, torch.bfloat16), reference))}
    for name, client in clients.items():
        for subject in client.subjects:
            if "layer" in subject:
                with client.server.awake():
                    rows = client.tensors(subject=subject, prompts=checked)
                found[f"{name}: {subject}"] = asdict(row_error(rows, reference))
    return found


def _read_arguments() -> Settings:
    parser = argparse.ArgumentParser(description="Measure the speed of midstream serve.")
    parser.add_argument("--small", action="store_true", help="16 prompts and 2 repetitions: does it run?")
    parser.add_argument("--repetitions", type=int, help="turns that every subject takes (9; small: 2)")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of every process")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is asked for in vllm-lens' environment")
    given = parser.parse_args()
    return Settings(
        small=given.small,
        prompts=16 if given.small else 32,
        tokens=128,
        repetitions=given.repetitions or (2 if given.small else 9),
        threads=given.threads,
        torch=given.torch,
    )


if __name__ == "__main__":
    main()
