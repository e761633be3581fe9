"""The speed of a server with our plugin: against plain `vllm serve` and a server with vllm-lens. All in one run.

    python benchmarks/serving.py                      the published run: 32 prompts of 128 tokens, 9 repetitions
    python benchmarks/serving.py --small

Needs .venv-vllm (`make setup-vllm`); vllm-lens gets an environment of its own. Every server and every client lives in a
process of its own for the whole run and is asked in turn. Writes build/benchmarks/served.json for publish.py.
"""

import argparse
import functools
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
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

from midstream.backends.bundled import smollm2_path

KINDS = ("plain", "midstream", "lens")


@dataclass(frozen=True)
class Settings:
    """What to run."""

    small: bool
    prompts: int
    tokens: int
    repetitions: int
    threads: int
    torch: str


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
    settings = _read_arguments()
    torch.set_num_threads(settings.threads)
    RESULTS.mkdir(parents=True, exist_ok=True)
    out = RESULTS / f"served{'-small' * settings.small}.json"
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
        figures["errors"] = _errors(clients, prompts)
        timings: dict[str, list[Timing]] = {}
        for run in runs.values():  # warm
            run()
        for turn in range(settings.repetitions):
            for name, timing in take_turns(runs, turn):
                timings.setdefault(name, []).append(timing)
                tell(f"repetition {turn + 1} of {settings.repetitions}: {name}: {timing.wall:.2f} s")
            given = {name: [asdict(one) for one in of] for name, of in timings.items()}
            out.write_text(json.dumps(figures | {"timings": given}, indent=1) + "\n")
    tell(f"figures are in {out}")


def _errors(clients: dict[str, ClientProcess], prompts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Each tool's rows of some prompts beside the float32 reference's; `plain`: transformers' own in bfloat16."""
    checked = list(range(0, len(prompts), max(1, len(prompts) // 6)))
    given = (smollm2_path(), prompts, checked)
    reference = plain_rows(*given, torch.float32, attn_implementation="eager")
    found = {"plain": asdict(row_error(plain_rows(*given, torch.bfloat16), reference))}
    for name, client in clients.items():
        for subject in ("one layer", "all layers"):
            if subject in client.subjects:
                with client.server.awake():
                    rows = client.tensors(subject=subject, prompts=checked)
                found[f"{name}: {subject}"] = asdict(row_error(rows, reference))
    return found


def _read_arguments() -> Settings:
    parser = argparse.ArgumentParser(description="Measure the speed of a server with our plugin.")
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
