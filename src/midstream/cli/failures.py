"""From an error that was foreseen to one line for a person, and an exit code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

from midstream.core.errors import (
    CaptureError,
    FileFormatError,
    MidstreamError,
    ModelLoadError,
    PromptError,
    SelfTestError,
    SpecError,
)

EXPECTED: Final = (MidstreamError, OSError, MemoryError)
"""What a command may end with; anything else is a fault of ours and keeps its traceback."""

_BAD_USAGE: Final = (
    SpecError, PromptError, FileFormatError, ModelLoadError,
    FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError,
)  # fmt: skip
_FAILED: Final = (SelfTestError, CaptureError)

_OPTIONS: Final = {
    "capture.layers": "--layers",
    "capture.sites": "--site",
    "sites": "--site",
    "site": "--site",
    "layer": "--layers",
    "layer_ids": "--layer-ids",
    "select": "--rows",
    "device": "--device",
    "steering": "--steer",
    "generation.max_tokens": "--max-tokens",
    "generation.min_tokens": "--min-tokens",
    "generation.temperature": "--temperature",
    "generation.top_p": "--top-p",
    "generation.top_k": "--top-k",
    "generation.repetition_penalty": "--repetition-penalty",
    "generation.seed": "--seed",
    "generation.n": "--n",
    "generation.stop": "--stop",
    "generation.ignore_eos": "--ignore-eos",
    "generation.logprobs": "--logprobs",
    "generation.constraint": "the constraint",
    "generation.constraint.json_schema": "--json-schema",
    "generation.constraint.regex": "--regex",
    "generation.constraint.grammar": "--grammar",
    "generation.constraint.choice": "--choice",
}
"""JSON path → the option by which a person gave it."""

_TYPE: Final = {
    "--layers": "--layers 10,20, or --layers all",
    "--layer": "--layer 10,20, or leave it out for all",
    "--steer-layers": "--steer-layers 10,20, or leave it out for all of the file",
    "--site": "--site resid_post",
    "--dtype": "--dtype float32",
    "--model-dtype": "--model-dtype float32",
    "--layer-ids": "--layer-ids 2,16,30, the ids that the file was written with",
}
"""What to type instead, for errors that do not say so themselves."""


def describe(error: BaseException) -> tuple[int, str]:
    """The exit code of `error` (2 bad usage, 1 failed work) and its line: what was asked, what exists, what to type."""
    code = 2 if isinstance(error, _BAD_USAGE) and not isinstance(error, _FAILED) else 1
    if isinstance(error, SpecError):
        return code, _in_options(error)
    if isinstance(error, OSError) and error.filename is not None:
        return code, f"{error.filename}: {error.strerror}"
    if isinstance(error, MemoryError):
        return code, "out of memory: choose fewer rows, layers or prompts"
    return code, str(error)


def _in_options(error: SpecError) -> str:
    """A SpecError with the option in place of the JSON path: `E_SITE at --site: …`."""
    known = [path for path in _OPTIONS if error.path == path or error.path.startswith((f"{path}[", f"{path}."))]
    if known:
        option = _OPTIONS[max(known, key=len)]
    else:  # a file keeps its name, whatever that holds
        option = error.path if error.path.startswith("--steer ") else error.path.partition("[")[0]
    line = f"{error.code} at {option}: {error.message}"
    return f"{line} (type {_TYPE[option]})" if option in _TYPE and "leave it out" not in line else line


@contextmanager
def plain_warnings() -> Iterator[None]:
    """While open, a warning is one line on stderr, without the place in the code; those of loaders are held back."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        typer.echo(f"midstream: warning: {' '.join(str(message).split())}", err=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(transformers|huggingface_hub|accelerate)(\.|$)")
        warnings.showwarning = show
        yield
