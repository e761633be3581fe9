"""The command line: `midstream`, one file per command.

Results go to stdout or to `--out`, words and progress to stderr. Exit codes: 0 done, 1 failed, 2 bad usage, 130
interrupted. A failure is one line on stderr. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer

from .budgets import budgets
from .capture import capture
from .demo import demo
from .generate import generate
from .harvest import harvest
from .inspect import inspect
from .keys import keys
from .schema import schema
from .score import score
from .serve import serve
from .verify import verify
from .vllm_serve import PASSED_ON, vllm_serve

app = typer.Typer(
    name="midstream",
    rich_markup_mode=None,  # help texts hold prompt[-1] and the like, which is not markup
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_UsageError: Any = typer.BadParameter.__base__
"""What typer raises for a line that it cannot read; older releases have it from click, newer ones of their own."""

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def _show_version(wanted: bool) -> None:
    if wanted:
        from midstream import __version__

        typer.echo(f"midstream {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def midstream(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Read and steer the residual stream of language models, with every number labelled.

    Begin with `midstream demo`: a small model, a capture, and a heat map to look at.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (demo, capture, harvest, generate, score, inspect, verify, schema, serve):
    app.command()(command)
app.command(name="vllm-serve", context_settings=PASSED_ON)(vllm_serve)
app.add_typer(keys, name="keys")
app.add_typer(budgets, name="budgets")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return its exit code; errors are one line on stderr."""
    from .failures import EXPECTED, describe, plain_warnings

    run = _command()
    try:
        with plain_warnings():
            # a number is what typer makes of `raise Exit(code)` and of Ctrl-C
            code = run(args=arguments, prog_name="midstream", standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "midstream"
        words = error.format_message().replace("Value error, ", "").rstrip(".")
        return _fail(2, f"{words} (see {command} --help)")
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return 1
    except EXPECTED as error:
        return _fail(*describe(error))
    if code == _INTERRUPTED:
        return _fail(code, "interrupted")
    return code or 0


@cache
def _command() -> Any:
    """The commands as typer makes them of our functions: most of the time of a call of help."""
    return typer.main.get_command(app)


def _fail(code: int, line: str) -> int:
    typer.echo(f"midstream: {' '.join(line.split())}", err=True)
    return code


def _close_stdout() -> None:
    """Whoever read our results has gone (`midstream … | head`): send the rest nowhere, so that exit is quiet."""
    import os

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
