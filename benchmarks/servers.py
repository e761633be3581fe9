"""Servers and their clients, each in a process of its own for a whole run; a server that is not asked is stopped."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from environments import HERE, Unavailable
from measure import Timing
from peer_process import LineProcess

BOOT_SECONDS = 600


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
