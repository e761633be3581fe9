"""The error classes and the closed list of `E_` codes.

Every message is one line: what was asked, what exists, what to type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

Code = Literal[
    "E_UNKNOWN_KIND",
    "E_UNKNOWN_FIELD",
    "E_BAD_PARAM",
    "E_LAYER_RANGE",
    "E_SITE",
    "E_SELECTION",
    "E_ARTIFACT_MISSING",
    "E_ARTIFACT_HASH",
    "E_CONSTRAINT",
    "E_SPEC_TOO_LARGE",
]

UNSUPPORTED: Final[frozenset[Code]] = frozenset({"E_UNKNOWN_KIND", "E_SITE", "E_CONSTRAINT"})
"""Codes that a client raises as `UnsupportedOperationError`; the others are `SpecError`s."""


class MidstreamError(Exception):
    """Base of every error that midstream raises on purpose."""


class SpecError(MidstreamError, ValueError):
    """A specification that is wrong, printed as `CODE at path: message`.

    >>> print(SpecError("E_LAYER_RANGE", "capture.layers[0]", "layer 40 is not in 0..29"))
    E_LAYER_RANGE at capture.layers[0]: layer 40 is not in 0..29
    """

    def __init__(self, code: Code, path: str, message: str) -> None:
        message = " ".join(line.strip() for line in message.splitlines())  # an array's repr may have several
        super().__init__(f"{code} at {path or '$'}: {message}")
        self.root = ""  # what `path` begins with, where a wire model's constructor put it there
        self.code: Code = code
        self.path = path
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.code, self.path, self.message)


class UnsupportedOperationError(SpecError):
    """Something well-formed that this backend or this model cannot do; the message names who can."""


class PromptError(MidstreamError, ValueError):
    """A prompt that cannot be used; the message begins with its index in the call."""


class ModelLoadError(MidstreamError):
    """A model that cannot be found, read or trusted."""


class SelfTestError(ModelLoadError):
    """The model's first tiny forward contradicted what docs/semantics.md says of a site."""


class CaptureError(MidstreamError):
    """Rows that were selected did not arrive, or a value could not be stored as asked."""


class UnfitAnswerError(CaptureError):
    """A server's answer that has not what was asked for, or in another form."""

    def __init__(self, what: str) -> None:
        super().__init__(f"Inference's answer does not fit the request: {what}")
        self.what = what

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what,)


class EngineError(MidstreamError, RuntimeError):
    """An engine, or a process of it, has died: load the model again."""


class TransportError(EngineError):
    """A server that cannot be reached, or whose answer never came whole; the same request can be sent again."""


class FileFormatError(MidstreamError, ValueError):
    """A file that is not what its reader reads, or is damaged."""


class PartialBatchError(MidstreamError):
    """Some items of a call failed; `completions` has the others, `failures` why, both by index in the call.

    again: the items whose request never came through, and can be sent again as they are.
    """

    def __init__(self, completions: Mapping[int, Any], failures: Mapping[int, MidstreamError]) -> None:
        first = min(failures)
        count = f"{len(failures)} of {len(completions) + len(failures)} items failed"
        super().__init__(f"{count}; item {first}: {failures[first]}")
        self.completions, self.failures = dict(completions), dict(failures)
        self.again = [index for index, error in sorted(failures.items()) if isinstance(error, TransportError)]


class BusyError(MidstreamError, RuntimeError):
    """A model or a backend that is in use: sessions and captures are exclusive."""


class SessionClosedError(MidstreamError, RuntimeError):
    """A session or a model was used after it was closed."""


def spec_error(code: Code, path: str, message: str) -> SpecError:
    """The error a client raises for `code`: `UnsupportedOperationError` for the codes in `UNSUPPORTED`."""
    kind = UnsupportedOperationError if code in UNSUPPORTED else SpecError
    return kind(code, path, message)


def json_path(root: str, location: tuple[int | str, ...]) -> str:
    """A location as a JSON path below `root`.

    >>> json_path("capture", ("select", "prompt_window", 0))
    'capture.select.prompt_window[0]'
    """
    path = root
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else (f".{part}" if path else part)
    return path


def choices(values: Mapping[str, Any] | list[str] | tuple[str, ...]) -> str:
    """The existing names, for the second half of a message: `a, b, c`."""
    return ", ".join(values)
