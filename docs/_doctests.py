"""The examples in docstrings as code: Markdown reads `>>>` as a quotation in a quotation, and `[0]["x"]` as a link."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)


class FencedDoctests(Extension):
    """Puts a fence around each block that begins with `>>>`, down to the next empty line."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """See griffe."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
