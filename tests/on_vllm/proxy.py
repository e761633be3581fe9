"""A proxy on loopback that does to requests what networks do."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@dataclass
class Reply:
    """What the server answered, to be changed on its way."""

    status: int
    headers: dict[str, str]
    body: bytes
    #: Of the body, how many bytes come before the connection breaks; None: all.
    broken_after: int | None = None


Fault = Callable[["Seen"], Reply | None]


@dataclass(frozen=True)
class Seen:
    """A request, and how often its path was asked for, this time included."""

    method: str
    path: str
    body: bytes
    count: int
    forward: Callable[[], Reply]


@dataclass
class Proxy:
    """fault: what becomes of a request; None lets it through."""

    url: str
    fault: Fault | None = None
    seen: list[tuple[str, str]] = field(default_factory=list)
    _counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, method: str, path: str) -> int:
        with self._lock:
            self.seen.append((method, path))
            self._counts[path] += 1
            return self._counts[path]

    def asked(self, path: str) -> int:
        return self._counts[path]


@contextmanager
def proxied(upstream: str) -> Iterator[Proxy]:
    """A proxy before a server. It reads each answer whole before it gives any of it: it buffers."""
    target = urlsplit(upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))

            def forward() -> Reply:
                connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
                kept = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                connection.request(self.command, self.path, body, kept)
                answer = connection.getresponse()
                found = Reply(answer.status, dict(answer.getheaders()), answer.read())
                connection.close()
                return found

            path = self.path.partition("?")[0]
            seen = Seen(self.command, path, body, proxy.count(self.command, path), forward)
            reply = proxy.fault(seen) if proxy.fault is not None else None
            self.send(reply or forward())

        def send(self, reply: Reply) -> None:
            self.send_response(reply.status)
            dropped = ("content-length", "transfer-encoding", "connection", "server", "date")
            for name, value in reply.headers.items():
                if name.lower() not in dropped:
                    self.send_header(name, value)
            self.send_header("content-length", str(len(reply.body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(reply.body[: reply.broken_after])
            if reply.broken_after is not None:
                self.close_connection = True

        do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = handle_one

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listening.daemon_threads = True
    proxy = Proxy(f"http://127.0.0.1:{listening.server_address[1]}")
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        listening.shutdown()
        listening.server_close()


def on(path: str, *faults: Fault) -> Fault:
    """The first requests of a path meet these, in order; later ones none."""

    def fault(seen: Seen) -> Reply | None:
        return faults[seen.count - 1](seen) if seen.path == path and seen.count <= len(faults) else None

    return fault


def status(code: int, **headers: str) -> Fault:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: Reply(code, {"content-type": "application/json", **named}, b'{"error": {"message": "busy"}}')


def broken(after: int) -> Fault:
    """The answer breaks off."""

    def fault(seen: Seen) -> Reply:
        reply = seen.forward()
        reply.broken_after = after
        return reply

    return fault


def slow(seconds: float) -> Fault:
    """Nothing comes for a while."""

    def fault(seen: Seen) -> Reply:
        time.sleep(seconds)
        return seen.forward()

    return fault


def garbled(body: bytes) -> Fault:
    """Something else comes."""

    def fault(seen: Seen) -> Reply:
        reply = seen.forward()
        reply.body = body
        return reply

    return fault
