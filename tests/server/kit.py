"""A real `midstream serve` in a process of its own, on a port of its own, which can be killed and started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from on_vllm.serving import free_port

BOOT = 120.0


class Serve:
    """One server; `arguments` after `midstream serve`."""

    def __init__(self, data_dir: Path, arguments: Sequence[str], **variables: str) -> None:
        self.data_dir, self.arguments, self.variables = data_dir, list(arguments), variables
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = data_dir / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        data_dir.mkdir(parents=True, exist_ok=True)

    def start(self) -> Serve:
        """Boot it, or boot it again on the same data."""
        command = [sys.executable, "-m", "midstream.cli", "serve", "--port", str(self.port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--data-dir", str(self.data_dir), *self.arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **self.variables},
                start_new_session=True,  # an engine beside it goes with it
            )
        until = time.monotonic() + BOOT
        while not self.ready():
            assert self._process.poll() is None, self.said()
            assert time.monotonic() < until, self.said()
            time.sleep(0.1)
        return self

    def ready(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/health/ready", timeout=5).status_code == 200
        except httpx2.TransportError:
            return False

    def said(self) -> str:
        """The end of its log."""
        return self.log.read_text()[-4000:]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """As the machine's failure does it."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self, within: float = 60) -> int:
        """SIGTERM; its exit status."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait(within)

    def close(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop(20)
        with contextlib.suppress(ProcessLookupError):
            self.kill()

    def client(self, key: str = "any", **given: Any) -> httpx2.Client:
        """A plain HTTP client."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=given.pop("timeout", 120), **given)
