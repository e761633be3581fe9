"""The error classes: their codes, what they are to `except`, their message, copying and pickling."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import get_args

import pytest

from midstream.core import errors
from midstream.core.errors import (
    CaptureError,
    Code,
    FileFormatError,
    MidstreamError,
    ModelLoadError,
    PromptError,
    SelfTestError,
    SessionClosedError,
    SpecError,
    UnsupportedOperationError,
    json_path,
    spec_error,
)

CODES: tuple[Code, ...] = get_args(Code)
UNSUPPORTED = {"E_UNKNOWN_KIND", "E_SITE", "E_CONSTRAINT"}


def test_the_closed_list_of_codes() -> None:
    assert set(CODES) == UNSUPPORTED | {
        "E_UNKNOWN_FIELD", "E_BAD_PARAM", "E_LAYER_RANGE", "E_SELECTION", "E_ARTIFACT_MISSING",
        "E_ARTIFACT_HASH", "E_SPEC_TOO_LARGE",
    }  # fmt: skip


@pytest.mark.parametrize("code", CODES)
def test_a_code_is_raised_as_its_class(code: Code) -> None:
    error = spec_error(code, "ops[0].site", "no such thing")
    assert isinstance(error, ValueError)
    assert isinstance(error, SpecError)
    assert isinstance(error, UnsupportedOperationError) is (code in UNSUPPORTED)
    assert (error.code, error.path, error.message) == (code, "ops[0].site", "no such thing")
    assert str(error) == f"{code} at ops[0].site: no such thing"


@pytest.mark.parametrize("code", ["E_SITE", "E_SELECTION"])
def test_copying_and_pickling(code: Code) -> None:
    error = spec_error(code, "capture.layers[0]", "layer 40 is not in 0..29")
    for again in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert (again.code, again.path, again.message) == (error.code, error.path, error.message)


def test_every_error_is_one_of_ours_and_documented() -> None:
    found = [
        thing
        for _, thing in inspect.getmembers(errors, inspect.isclass)
        if issubclass(thing, BaseException) and thing.__module__ == errors.__name__
    ]
    assert len(found) == 14
    assert all(issubclass(kind, MidstreamError) and kind.__doc__ for kind in found)


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (SpecError, ValueError),
        (UnsupportedOperationError, ValueError),
        (PromptError, ValueError),
        (FileFormatError, ValueError),
        (SessionClosedError, RuntimeError),
        (SelfTestError, ModelLoadError),
    ],
)
def test_errors_are_what_callers_catch(kind: type[Exception], also: type[Exception]) -> None:
    assert issubclass(kind, also)


@pytest.mark.parametrize("kind", [PromptError, FileFormatError, SessionClosedError, CaptureError, ModelLoadError])
def test_plain_errors_pickle(kind: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(kind("prompt 3 is empty")))
    assert type(again) is kind
    assert str(again) == "prompt 3 is empty"


@pytest.mark.parametrize(
    ("root", "location", "path"),
    [
        ("capture", (), "capture"),
        ("capture", ("layers", 0), "capture.layers[0]"),
        ("", ("ops", 2, "scope"), "ops[2].scope"),
        ("", (), ""),
        ("generation", ("stop", 1), "generation.stop[1]"),
    ],
)
def test_json_path(root: str, location: tuple[int | str, ...], path: str) -> None:
    assert json_path(root, location) == path
