"""`midstream vllm-serve`: a `vllm serve` that carries our plugin."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Final

import typer

PASSED_ON: Final = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Options that are not ours are vLLM's."""


def vllm_serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, a hub id, or smollm2 (bundled).")],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="DIR", help="A folder whose weights replace the model's."),
    ] = None,
    artifact_dir: Annotated[
        str | None,
        typer.Option(
            "--artifact-dir", metavar="DIR", help="Keep artifacts here, where clients that see it put theirs."
        ),
    ] = None,
    artifact_bytes: Annotated[
        int | None, typer.Option("--artifact-bytes", metavar="N", help="Of artifacts together; 4 GiB if left out.")
    ] = None,
    held_bytes: Annotated[
        int | None,
        typer.Option("--held-bytes", metavar="N", help="Of activations that wait for a client; 4 GiB if left out."),
    ] = None,
    held_seconds: Annotated[
        float | None, typer.Option("--held-seconds", metavar="S", help="How long they wait; 120 if left out.")
    ] = None,
    row_bytes: Annotated[
        int | None, typer.Option("--row-bytes", metavar="N", help="Of rows that wait in a worker; 8 GiB if left out.")
    ] = None,
    graph_sites: Annotated[
        str | None,
        typer.Option("--graph-sites", metavar="SITES", help="Sites in a compiled graph; resid_post if left out."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the line, and start nothing.")] = False,
) -> None:
    """Start a `vllm serve` with midstream's taps; all other options are vLLM's own (--port, --api-key, …).

    Prints the plain `vllm serve` line that it runs, with the variables that are set.
    """
    from midstream.backends.vllm.launching import launched

    given = {
        "artifact_dir": None if artifact_dir is None else os.path.abspath(artifact_dir),
        "artifact_bytes": artifact_bytes,
        "held_bytes": held_bytes,
        "held_seconds": held_seconds,
        "row_bytes": row_bytes,
        "graph": None if graph_sites is None else [one.strip() for one in graph_sites.split(",") if one.strip()],
    }
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    line = launched(model, list(context.args), settings, checkpoint)
    typer.echo(line.shown(), err=not dry_run)
    if dry_run:
        return
    sys.stdout.flush()
    os.execvpe(line.command[0], line.command, dict(line.environment))
