"""Real servers: `midstream vllm-serve` on a port of this machine, one for each checkpoint, for as long as tests run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import midstream as ms
from on_vllm.engine_options import ENGINE

BOOT_SECONDS = 240.0
MIDSTREAM = [sys.executable, "-c", "import sys; from midstream.cli import main; sys.exit(main())", "vllm-serve"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def flags(options: dict[str, Any]) -> list[str]:
    """Arguments of `vllm.LLM` as those of `vllm serve`."""
    found: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(flag)
        elif value is not False and value is not None:
            found += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


@dataclass
class Server:
    """One that is up."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()


def start(
    folder: Path | str,
    *arguments: str,
    log: Path,
    port: int | None = None,
    environment: dict[str, str] | None = None,
    command: list[str] | None = None,
    **engine: Any,
) -> Server:
    """Start one, and wait until it answers."""
    port = port or free_port()
    given = flags({"dtype": "float32", **ENGINE, **engine})
    line = [*(command or MIDSTREAM), str(folder), "--port", str(port)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING", **(environment or {})}
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*line, "--host", "127.0.0.1", *given, *arguments], stdout=out, stderr=out, env=env, start_new_session=True
        )
    server = Server(process, port, log)
    until = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return server
        except (OSError, urllib.error.URLError):
            time.sleep(0.3)
    server.stop()
    raise RuntimeError(f"no server:\n{log.read_text()[-4000:]}")


@dataclass
class Servers:
    """Those that are up, by what they serve."""

    _up: dict[Any, Server] = field(default_factory=dict)
    _started: int = 0
    _clients: dict[Any, ms.LanguageModel] = field(default_factory=dict)
    _scratch: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)

    def get(
        self, folder: Path | str, *arguments: str, environment: dict[str, str] | None = None, **engine: Any
    ) -> Server:
        key = (str(folder), arguments, repr(sorted(engine.items())))
        if key not in self._up:
            self._up[key] = start(folder, *arguments, log=self._log(), environment=environment, **engine)
        return self._up[key]

    def _log(self) -> Path:
        self._started += 1
        return Path(self._scratch.name) / f"{self._started}.log"

    def forget(self, server: Server) -> None:
        self._up = {key: one for key, one in self._up.items() if one is not server}

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
        for server in self._up.values():
            server.stop()
        self._scratch.cleanup()

    def bare(self, folder: Path | str, *arguments: str) -> Server:
        """One that vLLM starts itself, with our routes and without taps."""
        key = ("bare", str(folder), arguments)
        if key not in self._up:
            line = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
            environment = {"VLLM_PLUGINS": "midstream"}
            given = ("--skip-tokenizer-init", *arguments)
            self._up[key] = start(folder, *given, log=self._log(), command=line, environment=environment)
        return self._up[key]

    def stop(self, server: Server) -> None:
        """Stop one that nobody asks any more."""
        server.stop()
        self.forget(server)

    def lm(self, folder: Path | str, **options: Any) -> ms.LanguageModel:
        """A client of the server of a folder, which stays open."""
        key = (str(folder), repr(sorted(options.items())))
        if key not in self._clients:
            self._clients[key] = ms.load(
                str(folder), backend="vllm-serve", base_url=self.get(folder).url, max_retries=0, **options
            )
        return self._clients[key]


@contextmanager
def served(server: Server | str, model: Any = None, **options: Any) -> Iterator[ms.LanguageModel]:
    """The client of a server."""
    url = server if isinstance(server, str) else server.url
    with ms.load(model, backend="vllm-serve", base_url=url, **options) as lm:
        yield lm


def ask(url: str, body: Any = None, method: str | None = None, **headers: str) -> tuple[int, Any]:
    """One request without any of our code: its status, and its JSON or bytes."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    kinds = {"content-type": "application/json"} if data is not None else {}
    request = urllib.request.Request(url, data, {**kinds, **headers}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            content, status = answer.read(), answer.status
    except urllib.error.HTTPError as error:
        content, status = error.read(), error.code
    try:
        return status, json.loads(content)
    except ValueError:
        return status, content
