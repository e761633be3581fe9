"""`/metrics`: what a Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from .completing import Run

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Of one server. Nothing of a prompt, an answer or a key is in them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        given = {"registry": self.registry, "namespace": "midstream"}
        self._requests = Counter("http_requests", "Requests answered", ["route", "status"], **given)
        self._seconds = Histogram("http_seconds", "Until an answer was sent", ["route"], buckets=_SECONDS, **given)
        self._tokens = Counter("tokens", "Tokens of completions", ["kind"], **given)
        self._rows = Counter("captured_rows", "Rows of activations answered", **given)
        self._bytes = Counter("captured_bytes", "Bytes of activations answered", **given)
        for kind in ("prompt", "completion"):
            self._tokens.labels(kind)

    def gauge(self, name: str, words: str, value: Callable[[], float]) -> None:
        """A figure that is read when it is asked for."""
        Gauge(name, words, registry=self.registry, namespace="midstream").set_function(value)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def completed(self, run: Run) -> None:
        """A completion ended."""
        used = run.usage
        self._tokens.labels("prompt").inc(used.prompt_tokens)
        self._tokens.labels("completion").inc(used.completion_tokens)
        self._rows.inc(used.rows)
        self._bytes.inc(used.bytes)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)
