"""`midstream budgets`: how many tokens the keys of a server may spend."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from . import options
from .keys import DatabaseUrl, DataDir, KeyId, no_key, opened
from .output import counted, print_json, print_table, say

budgets = typer.Typer(rich_markup_mode=None)


@budgets.callback(invoke_without_command=True)
def budgets_of_keys(context: typer.Context) -> None:
    """Set and show how many tokens the keys of `midstream serve` may spend."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@budgets.command(name="set")
def set_budget(
    key: KeyId,
    tokens: Annotated[str, typer.Argument(metavar="TOKENS", help="In all, from its first on; `none` is no limit.")],
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: options.Json = False,
) -> None:
    """Set how many tokens a key may spend in all; what it has spent counts."""
    if tokens != "none" and not (tokens.isascii() and tokens.isdecimal() and int(tokens) < 1 << 63):
        from midstream.core.errors import spec_error

        raise spec_error("E_BAD_PARAM", "TOKENS", f"is a number of tokens, or none, got {tokens!r:.40}")
    with opened(data_dir, database) as held:
        from midstream.server.keys import Keys
        from midstream.server.ledger import Ledger

        if Keys(held).get(key) is None:
            raise no_key(key)
        ledger = Ledger(held)
        ledger.set_budget(key, None if tokens == "none" else int(tokens))
        found = ledger.budget(key)
    if json:
        return print_json({"key": key, **asdict(found)})
    left = "no limit" if found.left is None else f"{counted(found.left, 'token')} left"
    say(f"{key}: {left}, {found.held:,} held, {found.spent:,} spent")


@budgets.command()
def show(
    key: Annotated[str | None, typer.Argument(metavar="[KEY]", help="One key; all of them if left out.")] = None,
    data_dir: DataDir = None,
    database: DatabaseUrl = None,
    json: options.Json = False,
) -> None:
    """Show what keys may spend, hold, have spent and have left, in tokens, and what they have used."""
    with opened(data_dir, database) as held:
        from midstream.server.keys import Keys
        from midstream.server.ledger import Ledger

        ledger, known = Ledger(held), Keys(held)
        one = None if key is None else known.get(key)
        if key is not None and one is None:
            raise no_key(key)
        shown = [one] if one is not None else known.list()
        found = [(each, ledger.budget(each.id), ledger.usage(each.id)) for each in shown]
    if json:
        listed = [
            {"key": each.id, "name": each.name, **asdict(has), "usage": asdict(used)} for each, has, used in found
        ]
        return print_json(listed[0] if key is not None else {"budgets": listed})
    if not found:
        return say("no keys; type: midstream keys create NAME")
    rows = [
        [each.id, *("no limit" if number is None else f"{number:,}" for number in (has.budget, has.held, has.spent,
                                                                                 has.left)),
         f"{used.requests:,}", each.name]
        for each, has, used in found
    ]  # fmt: skip
    print_table(["key", "budget", "held", "spent", "left", "requests", "name"], rows, words=["name"])
