"""What a stream gives: a token at a time, and at the end the whole."""

from __future__ import annotations

from dataclasses import dataclass

from .generation import Completion
from .result import CaptureResult


@dataclass(frozen=True)
class Chunk:
    """A piece of a completion that grows: new ids, and the text that is certain by now.

    Texts of all chunks make the completion's text; a chunk's may be empty while characters or a stop string are
    unfinished. The last chunk has no ids; it has the whole `completion`, and the activations where they were asked for.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    completion: Completion | None = None
    capture: CaptureResult | None = None
