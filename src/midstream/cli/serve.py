"""`midstream serve`: the HTTP API."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .keys import DatabaseUrl, DataDir

if TYPE_CHECKING:
    from midstream.server.settings import Limits


def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="[ALIAS=]MODEL",
            help="A folder, a hub id, or smollm2 (bundled); several may be given. With --upstream it may be left out.",
        ),
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="The port.")] = 8000,
    backend: Annotated[
        str, typer.Option("--backend", metavar="KIND", help="huggingface, or vllm: an engine beside this process.")
    ] = "huggingface",
    upstream: Annotated[
        list[str] | None,
        typer.Option("--upstream", metavar="URL", help="A `midstream vllm-serve` to route to; several are one pool."),
    ] = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    steering: Annotated[
        Path | None,
        typer.Option("--steering", metavar="FILE", help="An InterventionSpec in JSON for requests that give none."),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="What the model computes in; auto: the checkpoint's own.")
    ] = "auto",
    device: Annotated[
        str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, …; auto: a GPU where there is one.")
    ] = "auto",
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="JSON", help="With --backend vllm: arguments of the engine, as an object."),
    ] = None,
    max_batch: Annotated[
        int, typer.Option("--max-batch", metavar="N", min=1, help="Sequences that run at a time (huggingface).")
    ] = 64,
    limit: Annotated[
        list[str] | None,
        typer.Option("--limit", metavar="NAME=NUMBER", help="One of the limits that /v1/capabilities shows."),
    ] = None,
) -> None:
    """Serve the OpenAI API, with activations and steering; until it is told to stop (SIGTERM, Ctrl-C).

    Without keys (`midstream keys create`) it takes any, and listens on this machine alone.
    """
    import asyncio

    from midstream.core.errors import spec_error
    from midstream.server.opening import Engines
    from midstream.server.running import Where, log_as_json, serve_models

    if backend not in ("huggingface", "vllm"):
        raise spec_error("E_BAD_PARAM", "--backend", f"no backend {backend!r}; there are: huggingface, vllm")
    where = Where(host, port, data_dir, database)
    engines = Engines(backend, tuple(upstream or ()), dtype, device, _engine(engine, backend), max_batch)
    given, limits = _steering(steering), _limits(limit or [])
    log_as_json()
    asyncio.run(serve_models(model or [], engines, where, limits, given))


def _engine(text: str | None, backend: str) -> dict[str, Any]:
    from .model import engine_kwargs

    return {} if text is None else engine_kwargs(text, backend)


def _steering(file: Path | None) -> Any:
    import json

    from midstream.core.errors import spec_error
    from midstream.formats.spec_json import decode_spec

    if file is None:
        return None
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise spec_error("E_BAD_PARAM", "--steering", f"{file} is no JSON: {error}") from None
    return decode_spec(value, "--steering")


def _limits(given: list[str]) -> Limits:
    """The limits, some of which were given as NAME=NUMBER."""
    import json

    from midstream.core.errors import spec_error
    from midstream.server.settings import Limits

    found: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or name not in Limits.model_fields:
            there = ", ".join(Limits.model_fields)
            raise spec_error("E_BAD_PARAM", "--limit", f"{one!r:.60} is no NAME=NUMBER; there are: {there}")
        try:
            found[name] = json.loads(value)
        except ValueError:
            raise spec_error("E_BAD_PARAM", "--limit", f"{value!r:.60} is no number, for {name}") from None
    return Limits.of(found, "--limit")
