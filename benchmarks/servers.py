"""Benchmarks of servers: they and their clients, each in a process of its own for a whole run, and the turns they take.

A server that is not asked is stopped.
"""

import argparse
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from environments import HERE, Unavailable
from measure import Timing
from peer_process import LineProcess
from reference import plain_rows, row_error

from midstream.backends.bundled import smollm2_path

BOOT_SECONDS = 600


@dataclass(frozen=True)
class Settings:
    """What to run."""

    small: bool
    prompts: int
    tokens: int
    repetitions: int
    threads: int
    torch: str


def read_settings(what: str) -> Settings:
    """The arguments of a benchmark that measures the speed of `what`."""
    parser = argparse.ArgumentParser(description=f"Measure the speed of {what}.")
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


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class ServerProcess:
    """One server; Unavailable where it does not come up."""

    def __init__(
        self, name: str, command: Sequence[object], port: int, scratch: Path, variables: Mapping[str, str]
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        log = scratch / f"{name}-server.log"
        with log.open("w") as out:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                stdout=out,
                stderr=out,
                env=kept | {"HF_HUB_OFFLINE": "1"} | variables,
                start_new_session=True,
            )
        until = time.monotonic() + BOOT_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.close()
                raise Unavailable((log.read_text().strip().splitlines() or [f"{name} said nothing"])[-1])
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    @contextmanager
    def awake(self) -> Iterator[None]:
        """While open it runs; else it is stopped, for an idle server of vLLM takes a fifth of a core."""
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGCONT)
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)


class ClientProcess(LineProcess):
    """A client of a server."""

    def __init__(
        self, kind: str, server: ServerProcess, python: Path, prompts: Path, threads: int, scratch: Path
    ) -> None:
        script = HERE / "peers" / "served_client.py"
        super().__init__(kind, [python, script, kind, server.url, prompts, threads], threads, scratch)
        self.subjects: list[str] = self.ready["subjects"]
        self.server = server

    def run(self, subject: str) -> Timing:
        with self.server.awake():
            return self.timed(subject=subject)


def row_errors(clients: Mapping[str, ClientProcess], prompts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Each tool's rows of some prompts beside the float32 reference's; `plain`: transformers' own in bfloat16."""
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
