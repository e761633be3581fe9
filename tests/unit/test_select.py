"""SelectSpec, the row grammar and `resolve` against a row-by-row reading of docs/semantics.md's table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from midstream.core.errors import SpecError, UnsupportedOperationError
from midstream.core.select import SelectSpec, resolve
from midstream.taps.step import whole_sequence

# --- the brute-force reading: one row at a time, straight off the table

TWINS = [
    "prompt_positions", "generation_positions", "sequence_positions",
    "prompt_window", "generation_window", "sequence_window",
    "prompt_tokens", "generation_tokens",
]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One row: its absolute position, its token, and the length of its request's prompt."""

    position: int
    token_id: int
    prompt_len: int

    @property
    def phase(self) -> str:
        return "prompt" if self.position < self.prompt_len else "generation"


def hit(name: str, value: Any, row: Row) -> bool:
    """Whether one clause, without its `exclude_`, names the row."""
    phase, _, clause = name.partition("_")
    if phase not in (row.phase, "sequence"):
        return False
    if value == "all":
        return True
    if clause == "tokens":
        return row.token_id in value
    place = row.position - row.prompt_len if phase == "generation" else row.position

    def counted(number: int) -> int:
        return number + row.prompt_len if number < 0 else number  # from the end of the prompt

    if clause == "positions":
        return any(counted(number) == place for number in value)
    windows = value if isinstance(value[0], list) else [value]
    return any(counted(start) <= place and (stop is None or place < counted(stop)) for start, stop in windows)


def selected(clauses: dict[str, Any] | None, row: Row) -> bool:
    """Union of the includes, minus union of the excludes; no spec is every row."""
    if clauses is None:
        return True
    included = any(hit(name, value, row) for name, value in clauses.items() if not name.startswith("exclude_"))
    excluded = any(
        hit(name.removeprefix("exclude_"), value, row) for name, value in clauses.items() if name.startswith("exclude_")
    )
    return included and not excluded


# --- random specs and tables

small = st.integers(0, 7)


@st.composite
def windows(draw: st.DrawFn, signed: bool) -> list[Any]:
    """One legal window or several; a window of mixed signs may hold positions on some prompts only."""

    def one() -> list[int | None]:
        if signed and draw(st.booleans()):
            kind = draw(st.sampled_from(["negative", "open", "mixed", "from the start"]))
            if kind == "negative":
                start = draw(st.integers(-6, -2))
                return [start, draw(st.integers(start + 1, -1))]
            if kind == "open":
                return [draw(st.integers(-6, -1)), None]
            if kind == "mixed":
                return [draw(st.integers(-6, -1)), draw(st.integers(1, 6))]
            return [draw(small), draw(st.integers(-6, -1))]
        start = draw(small)
        return [start, draw(st.none() | st.integers(start + 1, 9))]

    return one() if draw(st.booleans()) else [one() for _ in range(draw(st.integers(1, 3)))]


@st.composite
def clause_dicts(draw: st.DrawFn) -> dict[str, Any]:
    """A legal spec in the dict form: at least one include, no exclude of a phase that no include names."""

    def value(name: str) -> Any:
        phase, _, clause = name.partition("_")
        if clause == "window":
            return draw(windows(phase == "prompt"))
        if clause == "tokens":
            return draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
        number = st.integers(-6, 7) if phase == "prompt" else small
        return draw(st.lists(number, min_size=1, max_size=3))

    names = draw(st.sets(st.sampled_from(["prompt", "generation", *TWINS]), min_size=1, max_size=4))
    clauses = {name: "all" if name in ("prompt", "generation") else value(name) for name in sorted(names)}
    named = {name.partition("_")[0] for name in names}
    phases = {"prompt", "generation"} if "sequence" in named else named
    phases |= {"sequence"} if len(phases) == 2 else set()
    allowed = [name for name in TWINS if name.partition("_")[0] in phases]
    for name in sorted(draw(st.sets(st.sampled_from(allowed), max_size=3))):
        clauses[f"exclude_{name}"] = value(name)
    return clauses


@dataclass(frozen=True)
class Table:
    """What `resolve` reads, and nothing else."""

    position: NDArray[np.int64]
    token_id: NDArray[np.int64]
    prompt_len: NDArray[np.int64]


def table(rows: list[Row]) -> Table:
    def column(name: str) -> NDArray[np.int64]:
        return np.array([getattr(row, name) for row in rows], dtype=np.int64)

    return Table(column("position"), column("token_id"), column("prompt_len"))


@st.composite
def row_tables(draw: st.DrawFn) -> list[Row]:
    """Rows of several requests, mixed, with chunks missing: any subset in any order."""
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 3))):
        prompt_len, length = draw(st.integers(1, 6)), draw(st.integers(1, 10))
        tokens = draw(st.lists(st.integers(0, 4), min_size=length, max_size=length))
        whole = [Row(position, token, prompt_len) for position, token in enumerate(tokens)]
        start = draw(st.integers(0, length - 1))
        rows += whole[start : draw(st.integers(start, length))]
    return draw(st.permutations(rows))


@settings(deadline=None)
@given(clause_dicts(), row_tables())
def test_resolve_agrees_with_the_table(clauses: dict[str, Any], rows: list[Row]) -> None:
    mask = resolve(SelectSpec.of(clauses), table(rows))
    assert mask.dtype == np.bool_
    assert mask.tolist() == [selected(clauses, row) for row in rows]


@settings(deadline=None)
@given(row_tables())
def test_no_spec_is_every_row(rows: list[Row]) -> None:
    assert resolve(None, table(rows)).tolist() == [True] * len(rows)


@settings(deadline=None)
@given(clause_dicts(), row_tables(), st.randoms(use_true_random=False), st.integers(1, 4))
def test_order_and_chunks_do_not_matter(clauses: dict[str, Any], rows: list[Row], random: Any, size: int) -> None:
    spec = SelectSpec.of(clauses)
    mask = resolve(spec, table(rows))
    order = list(range(len(rows)))
    random.shuffle(order)
    assert resolve(spec, table([rows[place] for place in order])).tolist() == mask[order].tolist()
    chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
    assert [bit for chunk in chunks for bit in resolve(spec, table(chunk))] == mask.tolist()


# --- the grammar


@settings(deadline=None)
@given(clause_dicts())
def test_grammar_and_object_round_trip(clauses: dict[str, Any]) -> None:
    spec = SelectSpec.of(clauses)
    assert SelectSpec.parse(str(spec)) == spec
    assert hash(SelectSpec.parse(str(spec))) == hash(spec)
    assert str(SelectSpec.parse(str(spec))) == str(spec)
    assert SelectSpec.of(json.loads(json.dumps(spec.canonical()))) == spec
    assert SelectSpec.of(spec.canonical()).canonical() == spec.canonical()


EXAMPLES: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "all"},
    "generated": {"generation": "all"},
    "sequence": {"prompt": "all", "generation": "all"},
    "prompt[-1]": {"prompt_positions": [-1]},
    "prompt[0:5]": {"prompt_window": [0, 5]},
    "generated[3:]": {"generation_window": [3, None]},
    "sequence[17]": {"sequence_positions": [17]},
    "prompt{128000,128001}": {"prompt_tokens": [128000, 128001]},
    "prompt, generated, !prompt[0]": {"prompt": "all", "generation": "all", "exclude_prompt_positions": [0]},
    # scopes of the field
    "sequence[9:]": {"sequence_window": [9, None]},
    "prompt[-4:]": {"prompt_window": [-4, None]},
    # the other clauses
    "generated[2]": {"generation_positions": [2]},
    "generated{7}": {"generation_tokens": [7]},
    "sequence{7}": {"prompt_tokens": [7], "generation_tokens": [7]},
    "sequence[2:4], !sequence[3]": {"sequence_window": [2, 4], "exclude_sequence_positions": [3]},
    "generated, !generated{7}": {"generation": "all", "exclude_generation_tokens": [7]},
    "generated, !generated[2:]": {"generation": "all", "exclude_generation_window": [2, None]},
    "prompt, !prompt{7}": {"prompt": "all", "exclude_prompt_tokens": [7]},
    "prompt, !prompt[0:2]": {"prompt": "all", "exclude_prompt_window": [0, 2]},
    "prompt[0], prompt[-1]": {"prompt_positions": [0, -1]},
    "prompt[0:2], prompt[-2:]": {"prompt_window": [[0, 2], [-2, None]]},
}


@pytest.mark.parametrize(("text", "clauses"), EXAMPLES.items(), ids=EXAMPLES)
def test_grammar_says_what_the_object_says(text: str, clauses: dict[str, Any]) -> None:
    spec = SelectSpec.parse(text)
    assert spec == SelectSpec.of(clauses) == SelectSpec(**clauses)
    assert SelectSpec.parse(str(spec)) == spec
    assert SelectSpec.read(text) == SelectSpec.read(clauses) == SelectSpec.read(spec) == spec
    assert SelectSpec.parse(f"  {text.replace(', ', ' ,  ')} ") == spec


def test_none_stays_none() -> None:
    assert SelectSpec.read(None) is None


# --- what it means, in the words of docs/semantics.md


def places(text: str, prompt_len: int, length: int) -> list[int]:
    """The positions that a spec selects in one sequence of tokens 100, 101, …"""
    return np.flatnonzero(
        resolve(SelectSpec.parse(text), whole_sequence(range(100, 100 + length), prompt_len))
    ).tolist()


SELECTS: dict[str, list[int]] = {  # of four prompt rows and three generated ones
    "prompt[-1]": [3], "prompt[2:9]": [2, 3], "prompt[-9:-2]": [0, 1],
    "prompt[-5]": [], "prompt[4]": [],  # what the prompt does not have selects nothing
    "generated[0]": [4], "generated[1:]": [5, 6], "generated[9]": [],
    "sequence[3:5]": [3, 4], "sequence[17]": [],
    "prompt{105}, generated{101}": [], "prompt{101}, generated{105}": [1, 5],
    "sequence, !prompt[0]": [1, 2, 3, 4, 5, 6], "generated, prompt[-1]": [3, 4, 5, 6],
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SELECTS.items(), ids=SELECTS)
def test_positions(text: str, expected: list[int]) -> None:
    assert places(text, 4, 7) == expected


def test_phase_is_data_not_what_the_engine_takes_as_its_prompt() -> None:
    """A scored reference is generation, though one pass consumes prompt and reference together."""
    assert places("generated", 2, 6) == [2, 3, 4, 5]
    assert places("prompt[-1]", 2, 6) == [1]


def test_positions_count_from_the_end_of_the_whole_prompt_in_any_chunk() -> None:
    whole, spec = whole_sequence(range(8), 8), SelectSpec.parse("prompt[-3:-1]")
    chunks = [whole.take(np.arange(start, start + 2)) for start in range(0, 8, 2)]
    assert [resolve(spec, chunk).tolist() for chunk in chunks[2:]] == [[False, True], [True, False]]
    assert not resolve(spec, chunks[0]).any()


# --- refusals


def refusal(value: Any) -> SpecError:
    with pytest.raises(SpecError) as caught:
        SelectSpec.read(value)
    error = caught.value
    assert not isinstance(error, UnsupportedOperationError)
    assert str(error) == f"{error.code} at {error.path}: {error.message}"
    assert "\n" not in str(error)
    return error


BOTH: dict[str, Any] = {"prompt": "all", "generation": "all"}
NO_INTEGERS = [[True], [1.0], [0, 2.5], ["1"], [None], [[1]], "1", 1.5, True, {"0": 1}, [np.float32(1)]]
NO_WINDOWS = [
    [5, 2], [-1, -3], [[0, 1], [3, 3]],  # runs backwards, or holds nothing
    [1], [1, 2, 3], [[]], [None, 3], 3, "0:3", [True, 3], [0, True], [0.0, 3], [0, 3.0], ["0", 3],
    [0, float("nan")], [[0, 1], 5],
]  # fmt: skip
BAD_VALUES: dict[str, list[Any]] = {
    "prompt": ["some", [], 1],
    "generation": [True, "ALL"],
    "prompt_positions": [[], *NO_INTEGERS],
    "generation_positions": [[], [0, -1]],
    "sequence_positions": [[], [-1]],
    "prompt_window": [[], *NO_WINDOWS],
    "generation_window": [[], [-2, None], [[0, 1], [0, -1]], [2, 1]],
    "sequence_window": [[], [-2, None], [0, -1], [4, 1], [4, 4]],
    "prompt_tokens": [[]],
    "generation_tokens": [[], *NO_INTEGERS],
}
BAD_VALUES |= {f"exclude_{name}": BAD_VALUES[name] for name in TWINS}
BAD_CASES = [(name, bad) for name, values in BAD_VALUES.items() for bad in values]


@pytest.mark.parametrize(("name", "bad"), BAD_CASES, ids=[f"{name}={bad}" for name, bad in BAD_CASES])
def test_refused_value(name: str, bad: Any) -> None:
    error = refusal(BOTH | {name: bad})
    assert error.code == "E_SELECTION"
    # the place inside the clause's list may be named after it
    assert error.path == f"select.{name}" or error.path.startswith(f"select.{name}[")


@pytest.mark.parametrize("clause", [f"{clause}s" for clause in ("position", "token")] + ["window"])
@pytest.mark.parametrize(("phase", "other"), [("prompt", "generation"), ("generation", "prompt")])
def test_exclude_of_a_phase_that_no_include_names(phase: str, other: str, clause: str) -> None:
    exclude = {f"exclude_{phase}_{clause}": [0, 1]}
    for include in ({other: "all"}, {f"{other}_positions": [0]}, {f"{other}_window": [0, 2]}):
        error = refusal(include | exclude)
        assert (error.code, error.path) == ("E_SELECTION", f"select.exclude_{phase}_{clause}")
    for include in ({phase: "all"}, {f"{phase}_tokens": [0]}, {"sequence_positions": [0]}):
        assert SelectSpec.read(include | exclude)


def test_empty_spec() -> None:
    for value in ({}, {"prompt": None}, {"prompt_positions": None}):
        assert (refusal(value).code, refusal(value).path) == ("E_SELECTION", "select")


@pytest.mark.parametrize("name", ["prompts", "sequence", "sequence_tokens", "exclude_prompt", "select", "self"])
def test_unknown_field(name: str) -> None:
    error = refusal(BOTH | {name: [1]})
    assert error.code == "E_UNKNOWN_FIELD"
    assert error.path == f"select.{name}"
    assert "prompt_positions" in error.message  # what exists


@pytest.mark.parametrize("value", [5, 1.5, True, ["prompt"], b"prompt"])
def test_what_is_no_spec_is_refused(value: Any) -> None:
    error = refusal(value)
    assert (error.code, error.path) == ("E_SELECTION", "select")


NO_TEXT = [
    "", " ", ",", "!", "all", "prompts", "generation", "prompt[]", "prompt{}", "prompt[a]", "prompt[1.5]",
    "prompt[-1", "prompt{1", "prompt{1,}", "prompt[1:2:3]", "prompt[True]", "prompt generated",
    "prompt,,generated", "prompt[0]x", "!prompt[0]", "generated, !prompt[0]", "generated[-1]", "sequence[-1]",
    "prompt[5:2]", "prompt[-1:-3]", "generated[3:3]", "prompt, !!prompt[0]", f"prompt[{'9' * 5000}]",
]  # fmt: skip


@pytest.mark.parametrize("text", NO_TEXT, ids=[text[:20] for text in NO_TEXT])
def test_refused_text(text: str) -> None:
    error = refusal(text)
    assert error.code == "E_SELECTION"
    assert error.path.startswith("select")


def test_only_excludes_is_refused() -> None:
    assert refusal({"exclude_prompt_positions": [0]}).code == "E_SELECTION"
    assert refusal({"exclude_sequence_window": [0, 1]}).code == "E_SELECTION"


def test_a_sequence_include_names_both_phases() -> None:
    spec = SelectSpec(sequence_window=[0, 9], exclude_prompt_positions=[0], exclude_generation_positions=[0])
    assert np.flatnonzero(resolve(spec, whole_sequence(range(6), 3))).tolist() == [1, 2, 4, 5]


def test_path_is_the_callers() -> None:
    with pytest.raises(SpecError, match=r"^E_SELECTION at ops\[0\]\.scope\.prompt_positions: "):
        SelectSpec.read({"prompt_positions": []}, "ops[0].scope")
    with pytest.raises(SpecError, match=r"^E_SELECTION at ops\[0\]\.scope: "):
        SelectSpec.read("nonsense", "ops[0].scope")


# --- what is accepted


def test_numpy_integers() -> None:
    spec = SelectSpec(
        prompt_positions=[np.int64(-1), np.int32(0)],
        prompt_window=[np.int16(0), np.int64(3)],
        sequence_window=[[np.uint8(1), None]],
        generation_tokens=np.array([5, 4], dtype=np.uint32),
    )
    assert spec == SelectSpec.parse("prompt[-1], prompt[0], prompt[0:3], sequence[1:], generated{4,5}")
    json.dumps(spec.canonical())


def test_spec_is_plain_frozen_data() -> None:
    spec = SelectSpec(prompt_positions=(2, 0, 2), prompt_window=((0, 1),))
    assert spec == SelectSpec(prompt_positions=[0, 2], prompt_window=[0, 1])
    assert {spec: 1}[SelectSpec(prompt_positions=[0, 2], prompt_window=[[0, 1]])] == 1
    with pytest.raises(Exception, match="frozen"):
        spec.prompt = "all"
    assert set(spec.canonical()) == {"prompt_positions", "prompt_window"}
