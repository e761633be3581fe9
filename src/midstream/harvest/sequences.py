"""How documents become the sequences that a model reads: whole, split, truncated, or packed; from any place on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from midstream.core.errors import PromptError
from midstream.core.select import SelectSpec

from .spec import HarvestSpec

Ids = tuple[int, ...]


class Cursor(NamedTuple):
    """A place in the input: a record, and a token of it."""

    record: int = 0
    token: int = 0


@dataclass(frozen=True)
class Document:
    """One record as token ids. source: where it stands, for errors."""

    record: int
    token_ids: Ids
    source: str = ""
    labels: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Piece:
    """Tokens of one document in a sequence: `length` of them, from `start` in the document, at `position` in it."""

    document: Document
    start: int
    position: int
    length: int


@dataclass(frozen=True)
class Sequenced:
    """One sequence. fresh: its first position whose rows no sequence before has given. dropped: tokens left out."""

    token_ids: Ids
    pieces: tuple[Piece, ...]
    fresh: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class Window:
    """Sequences that belong together, and where the input goes on after them."""

    sequences: tuple[Sequenced, ...]
    next: Cursor


def windows(documents: Iterable[Document], spec: HarvestSpec, context: int, start: Cursor) -> Iterator[Window]:
    """The windows of an input from `start` on; `documents` begin with that record. context: of the model or the spec.

    PromptError, naming the record, for a document that is too long where that is refused.
    """
    stride = spec.stride or context
    if spec.packed:
        return _packed(documents, context, stride, spec.across, start)
    return _whole(documents, spec, context, stride, start)


def _whole(
    documents: Iterable[Document], spec: HarvestSpec, context: int, stride: int, start: Cursor
) -> Iterator[Window]:
    for one in documents:
        length = len(one.token_ids)
        first, after = start.token if one.record == start.record else 0, Cursor(one.record + 1)
        if length > context and spec.too_long == "refuse":
            raise too_long(one.source, length, context)
        if length <= context or spec.too_long == "truncate":
            ids = one.token_ids[:context]
            yield Window((Sequenced(ids, (Piece(one, 0, 0, len(ids)),), dropped=length - len(ids)),), after)
            continue
        for begin in range(first, max(length - context + stride, 1), stride):
            ids = one.token_ids[begin : begin + context]
            last = begin + context >= length
            piece = Piece(one, begin, 0, len(ids))
            sequence = Sequenced(ids, (piece,), fresh=context - stride if begin else 0)
            yield Window((sequence,), after if last else Cursor(one.record, begin + stride))


def too_long(source: str, tokens: int, context: int) -> PromptError:
    """The error for a document that is longer than a sequence may be."""
    return PromptError(
        f"{source} has {tokens:,} tokens, and a sequence {context:,} at most: type "
        "--too-long split, or --too-long truncate"
    )


def _packed(documents: Iterable[Document], context: int, stride: int, across: bool, start: Cursor) -> Iterator[Window]:
    held: list[Piece] = []  # from the window's start on; positions are counted from there
    fresh = context - stride if start != Cursor() else 0
    count = 0
    for one in documents:
        first = start.token if one.record == start.record else 0
        held.append(Piece(one, first, count, len(one.token_ids) - first))
        count += held[-1].length
        while count >= context:
            rest = _from(held, stride)
            after = Cursor(rest[0].document.record, rest[0].start) if rest else Cursor(one.record + 1)
            yield Window(_cut(held, context, fresh, across), after)
            held, count, fresh = rest, count - stride, context - stride
    if count > fresh:
        yield Window(_cut(held, count, fresh, across), Cursor(held[-1].document.record + 1))


def _from(pieces: Sequence[Piece], position: int) -> list[Piece]:
    """What of some pieces stands from `position` on, counted from there."""
    found: list[Piece] = []
    for one in pieces:
        skipped = max(0, position - one.position)
        if skipped < one.length:
            found.append(
                Piece(one.document, one.start + skipped, one.position + skipped - position, one.length - skipped)
            )
    return found


def _cut(held: Sequence[Piece], size: int, fresh: int, across: bool) -> tuple[Sequenced, ...]:
    """The first `size` tokens, as one sequence or as one for each piece that has something new."""
    pieces = [
        Piece(one.document, one.start, one.position, min(one.length, size - one.position))
        for one in held
        if one.position < size
    ]
    if across:
        return (Sequenced(tuple(token for one in pieces for token in _ids(one)), tuple(pieces), fresh),)
    return tuple(
        Sequenced(_ids(one), (Piece(one.document, one.start, 0, one.length),), max(0, fresh - one.position))
        for one in pieces
        if one.position + one.length > fresh
    )


def _ids(piece: Piece) -> Ids:
    return piece.document.token_ids[piece.start : piece.start + piece.length]


def fresh_select(select: SelectSpec | None, fresh: int) -> SelectSpec | None:
    """A selection without the rows before `fresh`.

    >>> str(fresh_select(None, 3)), str(fresh_select(SelectSpec.parse("prompt[-1]"), 3))
    ('prompt[3:]', 'prompt[-1], !prompt[0:3]')
    """
    if not fresh:
        return select
    if select is None:
        return SelectSpec(prompt_window=((fresh, None),))
    without = (*(select.exclude_prompt_window or ()), (0, fresh))
    return SelectSpec.of(select.canonical() | {"exclude_prompt_window": without})
