"""Type guards for values that come from outside, which narrow `Any` to something typed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np


def is_int(value: Any) -> TypeGuard[int]:
    """An integer, NumPy's too, and no boolean."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_list(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """A list or a tuple."""
    return isinstance(value, list | tuple)


def is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """A mapping, whose keys are taken to be names."""
    return isinstance(value, Mapping)


def items_of(value: Any) -> list[Any]:
    """The items of a list, tuple, set, range or array; ValueError for what is none of them."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise ValueError(f"must be a list, got {value!r:.60}")
    return list(value)


def plain(value: Any) -> Any:
    """A tensor or an array as lists of numbers; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value
