"""The speed of a server with our plugin: against plain `vllm serve` and a server with vllm-lens. All in one run.

    python benchmarks/serving.py                      the published run: 32 prompts of 128 tokens, 9 repetitions
    python benchmarks/serving.py --small

Needs .venv-vllm (`make setup-vllm`); vllm-lens gets an environment of its own. Every server and every client lives in a
process of its own for the whole run and is asked in turn. Writes build/benchmarks/served.json for publish.py.
"""

import functools
import json
import tempfile
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
from turns import run_turns

from midstream.backends.bundled import smollm2_path

KINDS = ("plain", "midstream", "lens")


def server_process(kind: str, python: Path, scratch: Path) -> ServerProcess:
    """A `vllm serve`: plain, with our plugin, or with vllm-lens'."""
    port = free_port()
    own = ["-c", "from midstream.cli import main; main()", "vllm-serve"]
    start = own if kind == "midstream" else ["-m", "vllm.entrypoints.cli.main", "serve"]
    given = {
        "--dtype": "bfloat16", "--max-model-len": "2048", "--kv-cache-memory-bytes": str(1 << 28),
        "--max-num-batched-tokens": "2048", "--max-num-seqs": "64", "--port": str(port), "--host": "127.0.0.1",
    }  # fmt: skip
    words = [python, *start, smollm2_path(), *(word for pair in given.items() for word in pair)]
    plugins = {} if kind == "midstream" else {"VLLM_PLUGINS": "activations" if kind == "lens" else ""}
    # no OMP_NUM_THREADS: vLLM keeps a core for the server itself, and two threads on the other are slow
    variables = {"VLLM_LOGGING_LEVEL": "WARNING"} | plugins
    return ServerProcess(kind, [*words, "--enforce-eager", "--no-enable-prefix-caching"], port, scratch, variables)


def main() -> None:
    settings = read_settings("a server with our plugin")
    torch.set_num_threads(settings.threads)
    RESULTS.mkdir(parents=True, exist_ok=True)
    out = RESULTS / f"served{'-small' * settings.small}.json"
    figures: dict[str, Any] = {"settings": asdict(settings), "versions": environment_facts(), "skipped": {}}
    prompts = equal_prompts(smollm2_path(), settings.prompts, settings.tokens)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = scratch / "prompts.json"
        file.write_text(json.dumps(prompts))
        runs: dict[str, Callable[[], Timing]] = {}
        clients: dict[str, ClientProcess] = {}
        for kind in KINDS:
            tell(f"{kind}: booting")
            try:
                python = lens_python(settings.torch) if kind == "lens" else VLLM_PYTHON
                server = server_process(kind, python, scratch)
                stack.callback(server.close)
                clients[kind] = ClientProcess(kind, server, python, file, settings.threads, scratch)
            except Unavailable as reason:
                tell(f"{kind}: skipped: {reason}")
                figures["skipped"][kind] = str(reason)
                continue
            stack.callback(clients[kind].close)
            figures["versions"] |= clients[kind].versions
            runs |= {f"{kind}: {of}": functools.partial(clients[kind].run, of) for of in clients[kind].subjects}
        figures["errors"] = row_errors(clients, prompts)
        run_turns(runs, settings.repetitions, figures, out)


if __name__ == "__main__":
    main()
