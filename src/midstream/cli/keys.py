"""`midstream keys`: who may use a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .output import print_json, print_table, say

if TYPE_CHECKING:
    from midstream.server.keys import Key
    from midstream.server.storage import Database

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="DIR",
        help="The server's data directory; $XDG_DATA_HOME/midstream or ~/.local/share/midstream if left out.",
    ),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option("--database", metavar="URL", help="A database elsewhere, e.g. postgresql+psycopg://USER@HOST/NAME."),
]
KeyId = Annotated[str, typer.Argument(metavar="KEY", help="The id of a key, as `midstream keys list` shows it.")]

keys = typer.Typer(rich_markup_mode=None)


@keys.callback(invoke_without_command=True)
def keys_of_a_server(context: typer.Context) -> None:
    """Make, list and revoke the keys of `midstream serve`.

    A server without keys takes any, and is reached from its own machine alone.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@keys.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What the key is called, for people.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope",
            metavar="SCOPES",
            help="What it may do, of complete,capture,steer,harvest,admin; all but admin if left out.",
        ),
    ] = None,
    budget: Annotated[
        int | None, typer.Option("--budget", metavar="TOKENS", min=0, help="What it may spend; no limit if left out.")
    ] = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: options.Json = False,
) -> None:
    """Make a key, and print its secret, which is not shown again."""
    with opened(data_dir, database, make=True) as held:
        from midstream.server.keys import USUAL, Keys, as_scopes

        words = [part.strip() for word in scope for part in word.split(",")] if scope else USUAL
        key, secret = Keys(held).create(name, as_scopes(words, "--scope"), budget)
    if json:
        return print_json({**as_json(key), "secret": secret})
    say(
        f"made {key.id} for {name}: {', '.join(as_json(key)['scopes'])}; this is the only time that its secret is shown"
    )
    typer.echo(secret)


@keys.command(name="list")
def list_keys(data_dir: DataDir = None, database: DatabaseUrl = None, json: options.Json = False) -> None:
    """Show the keys that were made, revoked ones too."""
    with opened(data_dir, database) as held:
        from midstream.server.keys import Keys

        found = Keys(held).list()
    if json:
        return print_json({"keys": [as_json(key) for key in found]})
    if not found:
        return say("no keys; type: midstream keys create NAME")
    rows = [
        [key.id, f"{key.prefix}-…", ",".join(as_json(key)["scopes"]), _day(key.created), _day(key.revoked_at), key.name]
        for key in found
    ]
    print_table(["key", "secret", "scopes", "made", "revoked", "name"], rows, words=["name"])


@keys.command()
def revoke(key: KeyId, data_dir: DataDir = None, database: DatabaseUrl = None, json: options.Json = False) -> None:
    """Let a key open nothing any more. What it owns stays."""
    with opened(data_dir, database) as held:
        from midstream.server.keys import Keys

        found = Keys(held).revoke(key)
    if found is None:
        raise no_key(key)
    if json:
        return print_json(as_json(found))
    say(f"revoked {found.id} ({found.name})")


@contextmanager
def opened(data_dir: Path | None, database: str | None, make: bool = False) -> Iterator[Database]:
    """The database that a server with these options has; FileNotFoundError where it is not there, unless `make`."""
    try:
        from midstream.server.storage import Database, default_data_dir, sqlite_url
    except ModuleNotFoundError as error:
        from midstream.core.errors import MidstreamError

        raise MidstreamError(f"needs {error.name}; type: pip install 'midstream[server]'") from None
    if database is None:
        directory = data_dir or default_data_dir()
        if not make and not (directory / "midstream.db").exists():
            raise FileNotFoundError(f"no keys in {directory}; type: midstream keys create NAME, or name a --data-dir")
        database = sqlite_url(directory)
    with Database.open(database) as held:
        yield held


def no_key(key_id: str) -> Exception:
    """What is raised where there is no such key."""
    from midstream.core.errors import spec_error

    return spec_error("E_BAD_PARAM", "KEY", f"no key {key_id!r:.60}; type: midstream keys list")


def as_json(key: Key) -> dict[str, Any]:
    """A key as plain data, without its secret."""
    from midstream.server.keys import SCOPES

    return {
        "id": key.id,
        "name": key.name,
        "prefix": key.prefix,
        "scopes": [scope for scope in SCOPES if key.may(scope)],
        "budget": key.budget,
        "created": key.created,
        "revoked_at": key.revoked_at,
    }


def _day(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).date().isoformat()
