"""What the documents quote from the code, for the cog blocks in them.

In ``docs/cli.md``::

    <!-- [[[cog
    import cog, _generate
    cog.outl(_generate.cli_reference())
    ]]] -->
    <!-- [[[end]]] -->

``make docs`` rewrites such blocks; a test holds them against the code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

LEFT_OUT = {"--help", "--install-completion", "--show-completion"}


def cli_reference() -> str:
    """Every command of ``midstream``, its arguments and its options, as Markdown from level two on."""
    from midstream.cli import app

    root = typer.main.get_command(app)
    blocks = [block for path, command in _commands(root, "midstream", None) for block in _describe(path, command)]
    return "\n\n".join(blocks)


def _commands(command: Any, name: str, parent: Any) -> Iterator[tuple[Any, Any]]:
    """The command and all below it, each with its context, in the order in which they were registered."""
    context = typer.Context(command, info_name=name, parent=parent)
    yield context, command
    if hasattr(command, "list_commands"):
        for child in command.list_commands(context):
            below = command.get_command(context, child)
            if not below.hidden:
                yield from _commands(below, child, context)


def _describe(context: Any, command: Any) -> Iterator[str]:
    """Heading, what it does, usage, and one list item for each parameter."""
    if context.parent is not None:
        level = "#" * (1 + len(context.command_path.split()) - 1)
        yield f"{level} {context.command_path}"
    if command.help:
        yield inspect.cleandoc(command.help.split("\f")[0]).strip()
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"```console\n{usage}\n```"
    records = [
        parameter.get_help_record(context)
        for parameter in command.get_params(context)
        if not LEFT_OUT.intersection(parameter.opts)
    ]
    items = [f"- `{name}`" + (f": {words}" if words else "") for name, words in filter(None, records)]
    if items:
        yield "\n".join(items)
