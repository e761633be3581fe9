"""Token texts as a person can see them: on a page, in a picture, on a terminal."""

from __future__ import annotations

import unicodedata
from typing import Final

_SHOWN: Final = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}


def visible(text: str, most: int | None = None) -> str:
    """`text` with its white space at the ends and its line ends shown, control characters escaped, cut to `most`.

    >>> visible(" capital"), visible("a b"), visible(":\\n  "), visible("\\x1b[31m")
    ('·capital', 'a b', ':↵··', '\\\\x1b[31m')
    """
    start, stop = len(text) - len(text.lstrip(" ")), len(text.rstrip(" "))
    shown = "".join(
        _SHOWN[char] if char in _SHOWN and (char != " " or not start <= place < stop) else _escaped(char)
        for place, char in enumerate(text)
    )
    if shown and unicodedata.category(shown[0]).startswith("M"):
        shown = "◌" + shown  # a mark that would sit on whatever stands before it
    return shown if most is None or len(shown) <= most else shown[: most - 1] + "…"


def _escaped(char: str) -> str:
    """A character that shows nothing, or that changes how others show, as its escape."""
    hidden = unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
    return char.encode("unicode_escape").decode() if hidden and char != "\u200d" else char
