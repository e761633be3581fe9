"""A server put together, and run until it is told to stop."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import uvicorn

from midstream.core.errors import spec_error
from midstream.core.interventions import InterventionSpec
from midstream.formats.artifacts import ArtifactRegistry
from midstream.formats.held import Held

from .api import Api
from .app import create_app
from .asking import Served
from .completing import Completing, Places
from .files import Files
from .jobs_store import Jobs
from .keys import Keys
from .ledger import Ledger
from .metrics import Metrics
from .opening import Engines, started
from .owned import Owned
from .settings import Limits
from .storage import Database
from .storage.database import default_data_dir, sqlite_url

_LOG: Final = logging.getLogger("midstream.server")
_PLAIN: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


@dataclass(frozen=True)
class Where:
    """Where a server listens and keeps its things. database: a URL; None: SQLite in the data directory."""

    host: str = "127.0.0.1"
    port: int = 8000
    data_dir: Path | None = None
    database: str | None = None

    @property
    def directory(self) -> Path:
        """The data directory."""
        return (self.data_dir or default_data_dir()).absolute()

    def registry(self) -> ArtifactRegistry:
        """The artifacts of all keys; each key has a quota of its own, the disk is the bound of all."""
        return ArtifactRegistry(self.directory / "artifacts", 1 << 50)


def api_for(models: Mapping[str, Served], where: Where, limits: Limits, registry: ArtifactRegistry) -> Api:
    """What routes answer with. SpecError: without keys, on an address that others reach."""
    database = Database.open(where.database or sqlite_url(where.directory))
    keys, ledger = Keys(database), Ledger(database, lease_seconds=limits.lease_seconds)
    anonymous = None if keys.any() else keys.anonymous()
    if anonymous is not None:
        _check_loopback(where.host)
    held = Held(limits.held_bytes, limits.held_seconds)
    return Api(
        models=models,
        limits=limits,
        database=database,
        keys=keys,
        ledger=ledger,
        owned=Owned(database, limits.artifact_bytes, limits.file_bytes),
        registry=registry,
        files=Files(where.directory / "files"),
        jobs=Jobs(
            database,
            ledger,
            limits.result_bytes,
            lease_seconds=limits.lease_seconds,
            keep_seconds=limits.job_seconds,
        ),
        held=held,
        completing=Completing(ledger, held, limits, Places(limits)),
        metrics=Metrics(),
        anonymous=anonymous,
    )


def _check_loopback(host: str) -> None:
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        message = f"{host} can be reached by others, and there are no keys: make one with `midstream keys create`"
        raise spec_error("E_BAD_PARAM", "host", f"{message}, or listen on 127.0.0.1")


class _Server(uvicorn.Server):
    """Is not ready any more as soon as it is told to stop, and ends without a signal's status."""

    def __init__(self, config: uvicorn.Config, api: Api) -> None:
        super().__init__(config)
        self._api = api

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Hear SIGTERM and SIGINT while open; uvicorn's own way raises them again when all is done."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self.handle_exit, sig, None)
        try:
            yield
        finally:
            for sig in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(sig)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came; the second one ends it at once."""
        self._api.stopping.set()
        super().handle_exit(sig, frame)


async def serve_models(
    given: Sequence[str], engines: Engines, where: Where, limits: Limits, steering: InterventionSpec | None
) -> None:
    """Load models and answer until SIGTERM; then finish what runs within `stop_seconds`."""
    registry = where.registry()
    models = await started(given, engines, registry, steering)
    try:
        api = api_for(named(models), where, limits, registry)
        config = uvicorn.Config(
            create_app(api),
            host=where.host,
            port=where.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=max(1, round(limits.stop_seconds)),
            h11_max_incomplete_event_size=64 << 10,
            server_header=False,
        )
        if api.anonymous is not None:
            _LOG.warning("there are no keys: any is accepted, on this machine alone")
        names = ", ".join(one.name for one in models)
        _LOG.info("serving", extra={"models": names, "host": where.host, "port": where.port})
        await _Server(config, api).serve()
    finally:
        for one in models:
            await one.engine.close()


class _AsJson(logging.Formatter):
    """One JSON object for each line."""

    def format(self, record: logging.LogRecord) -> str:
        """A record's time, level, message, and whatever was said beside it."""
        said: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        said |= {name: value for name, value in vars(record).items() if name not in _PLAIN}
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said, default=str)


def log_as_json() -> None:
    """Let this process write its log to stderr, a JSON object a line; MIDSTREAM_LOG_LEVEL says from which level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(_AsJson())
    logging.basicConfig(level=os.environ.get("MIDSTREAM_LOG_LEVEL", "INFO").upper(), handlers=[handler], force=True)
    for noisy in ("uvicorn.error", "alembic", "httpx2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def named(models: Sequence[Served]) -> dict[str, Served]:
    """Models by reference and alias; E_BAD_PARAM for a name that two of them have."""
    found: dict[str, Served] = {}
    for one in models:
        for name in (one.name, *one.aliases):
            if found.get(name, one) is not one:
                raise spec_error("E_BAD_PARAM", "model", f"{name!r} names two models: give one of them another alias")
            found[name] = one
    return found
