"""How documents become sequences and shards: every token once, and the same from wherever one goes on."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midstream.core.capture import CaptureSpec
from midstream.core.errors import PromptError, SpecError
from midstream.formats.records import Record
from midstream.harvest.planning import Planner
from midstream.harvest.sequences import Cursor, Document, Window, windows
from midstream.harvest.spec import HarvestSpec

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def documents(lengths: list[int]) -> list[Document]:
    """Documents whose every token is another."""
    found, first = [], 0
    for record, length in enumerate(lengths):
        found.append(Document(record, tuple(range(first, first + length)), f"a:{record}"))
        first += length
    return found


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Document], HarvestSpec, int]:
    context = draw(st.integers(1, 16))
    stride = draw(st.none() | st.integers(1, context))
    packed = draw(st.booleans())
    across = packed and draw(st.booleans())
    spec = HarvestSpec(
        packed=packed,
        across=across,
        stride=stride,
        context=context,
        too_long="refuse" if packed else "split",
        shard_tokens=draw(st.integers(1, 60)),
    )
    return documents(draw(LENGTHS)), spec, context


def fresh_tokens(found: list[Window]) -> list[int]:
    return [token for one in found for sequence in one.sequences for token in sequence.token_ids[sequence.fresh :]]


@given(plans())
def test_every_token_is_kept_once_and_in_order(plan: tuple[list[Document], HarvestSpec, int]) -> None:
    given_documents, spec, context = plan
    found = list(windows(given_documents, spec, context, Cursor()))
    assert fresh_tokens(found) == [token for one in given_documents for token in one.token_ids]
    for sequence in (sequence for one in found for sequence in one.sequences):
        assert 0 < len(sequence.token_ids) <= context
        parts = [one.document.token_ids[one.start : one.start + one.length] for one in sequence.pieces]
        assert sequence.token_ids == tuple(token for part in parts for token in part)
        assert [one.position for one in sequence.pieces] == [sum(map(len, parts[:i])) for i in range(len(parts))]
        if not spec.across:
            assert len(sequence.pieces) == 1, "documents meet in a sequence"


@given(plans())
def test_a_window_before_another_is_full(plan: tuple[list[Document], HarvestSpec, int]) -> None:
    given_documents, spec, context = plan
    found = list(windows(given_documents, spec, context, Cursor()))
    if spec.across:
        assert all(len(one.sequences[0].token_ids) == context for one in found[:-1])
        stride = spec.stride or context
        for before, after in pairwise(found):
            shared = context - stride
            assert before.sequences[0].token_ids[stride:] == after.sequences[0].token_ids[:shared]


@given(plans(), st.data())
def test_it_goes_on_the_same_from_any_window(
    plan: tuple[list[Document], HarvestSpec, int], data: st.DataObject
) -> None:
    given_documents, spec, context = plan
    found = list(windows(given_documents, spec, context, Cursor()))
    place = data.draw(st.integers(0, len(found) - 1))
    start = found[place].next
    rest = list(windows(given_documents[start.record :], spec, context, start))
    assert rest == found[place + 1 :]


@settings(max_examples=50)
@given(plans(), st.data())
def test_shards_are_the_same_from_any_shard(plan: tuple[list[Document], HarvestSpec, int], data: st.DataObject) -> None:
    given_documents, spec, context = plan
    records = [Record(list(one.token_ids), one.source) for one in given_documents]

    planner = Planner(spec, lambda one: tuple(one.prompt), context, 4)
    found = list(planner.shards(records, 0, Cursor()))
    assert [one.index for one in found] == list(range(len(found)))
    end = found[-1].next  # of overlapping sequences the last may end short of it: nothing new follows
    assert not list(planner.shards(records[end.record :], len(found), end))
    place = data.draw(st.integers(0, len(found) - 1))
    start = found[place].next
    assert list(planner.shards(records[start.record :], place + 1, start)) == found[place + 1 :]
    most = spec.shard_tokens + context
    assert all(one.tokens <= most + (context if spec.packed else 0) for one in found)


def test_shards_close_at_their_bytes() -> None:
    records = [Record([1, 2, 3], f"a:{i}") for i in range(6)]
    spec = HarvestSpec(capture=CaptureSpec(select="prompt[-1]"), shard_bytes=20)
    planner = Planner(spec, lambda one: tuple(one.prompt), 16, 10)
    assert [len(one.sequences) for one in planner.shards(records, 0, Cursor())] == [2, 2, 2]


def test_what_is_too_long() -> None:
    given_documents = documents([3, 9])
    with pytest.raises(PromptError, match=r"a:1 has 9 tokens, and a sequence 4 at most: type --too-long split"):
        list(windows(given_documents, HarvestSpec(), 4, Cursor()))
    cut = list(windows(given_documents, HarvestSpec(too_long="truncate"), 4, Cursor()))
    assert [(one.sequences[0].token_ids, one.sequences[0].dropped) for one in cut] == [
        ((0, 1, 2), 0),
        ((3, 4, 5, 6), 5),
    ]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"across": True}, "E_BAD_PARAM at harvest.across: is for packed documents"),
        ({"packed": True, "too_long": "split"}, "E_BAD_PARAM at harvest.too_long: packed documents have any length"),
        ({"stride": 4}, "E_BAD_PARAM at harvest.stride: is for documents that are split or packed"),
        ({"stride": 9, "packed": True, "context": 8}, "would leave out tokens between sequences of 8"),
        ({"capture": {"select": "generated"}}, "E_SELECTION at harvest.capture.select: a harvest generates nothing"),
        ({"pool": "mean", "capture": {"dtype": "int32"}}, "a mean is no int32"),
        ({"shard_tokens": 0}, "E_BAD_PARAM at harvest.shard_tokens"),
        ({"pool": "max"}, "E_BAD_PARAM at harvest.pool"),
        ({"kontext": 3}, "E_UNKNOWN_FIELD at harvest.kontext"),
    ],
)
def test_specs_that_mean_nothing(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as raised:
        HarvestSpec.of(fields)
    assert says in str(raised.value)
