"""The speed of `midstream serve`: against its own engine without a server, and vllm-lens' server. All in one run.

    python benchmarks/api.py                      the published run: 32 prompts of 128 tokens, 9 repetitions
    python benchmarks/api.py --small

The servers are the embedded engine (from this environment), `--backend vllm` (from .venv-vllm), and a `vllm serve` with
vllm-lens. Writes build/benchmarks/api.json for publish.py.
"""

import functools
import json
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
from measure import Timing
from prompts import equal_prompts
from servers import ClientProcess, ServerProcess, free_port, read_settings, row_errors
from serving import server_process
from turns import run_turns

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
    settings = read_settings("midstream serve")
    torch.set_num_threads(settings.threads)
    RESULTS.mkdir(parents=True, exist_ok=True)
    out = RESULTS / f"api{'-small' * settings.small}.json"
    figures: dict[str, Any] = {"settings": asdict(settings), "versions": environment_facts(), "skipped": {}}
    prompts = equal_prompts(smollm2_path(), settings.prompts, settings.tokens)
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
        figures["errors"] = row_errors(clients, prompts)
        run_turns(runs, settings.repetitions, figures, out, transports)


if __name__ == "__main__":
    main()
