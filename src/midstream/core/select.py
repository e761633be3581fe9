"""Which rows: SelectSpec, the row grammar, and `resolve` (docs/semantics.md).

One language chooses rows for captures and for the scope of every intervention, in Python, JSON and on the
command line. Phase is data: a row is `generation` when its position is at least its request's `prompt_len`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, PlainSerializer, model_validator

from .errors import Code, SpecError, spec_error
from .narrow import is_int, is_list, items_of
from .wire import Int, Wire

Phase = Literal["prompt", "generation"]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Rows(Protocol):
    """What `resolve` reads of a table of rows: three int64 arrays `[rows]`."""

    @property
    def position(self) -> Ints:
        """Absolute positions."""
        ...

    @property
    def token_id(self) -> Ints:
        """Tokens consumed."""
        ...

    @property
    def prompt_len(self) -> Ints:
        """Prompt lengths of the rows' requests."""
        ...


def _sorted_ints(value: Any) -> Any:
    """One int or several as a sorted tuple without repeats; `None` stays."""
    if value is None:
        return None
    items = [value] if is_int(value) else items_of(value)
    if not items:
        raise ValueError("an empty list selects nothing: leave the clause out")
    if not all(is_int(item) for item in items):
        raise ValueError(f"must be a list of integers, got {items!r:.80}")
    return tuple(sorted({int(item) for item in items}))


def _windows(value: Any) -> Any:
    """`[start, stop]` or a list of them as a sorted tuple of pairs; `None` stays."""
    if value is None:
        return None
    items = items_of(value)
    if not items:
        raise ValueError("an empty list selects nothing: leave the clause out")
    if not is_list(items[0]):
        items = [items]
    for item in items:
        if not is_list(item) or len(item) != 2:
            raise ValueError(f"a window is [start, stop], got {item!r:.80}")
        if not is_int(item[0]):
            raise ValueError(f"a window's start is an integer, got {item[0]!r}")
        if item[1] is not None and not is_int(item[1]):
            raise ValueError(f"a window's stop is an integer or null (open), got {item[1]!r}")
    pairs = {(int(start), None if stop is None else int(stop)) for start, stop in items}
    return tuple(sorted(pairs, key=lambda pair: (pair[0], pair[1] is None, pair[1] or 0)))


Positions = Annotated[tuple[Int, ...] | None, BeforeValidator(_sorted_ints)]
Windows = Annotated[tuple[tuple[Int, Int | None], ...] | None, BeforeValidator(_windows)]
All = Literal["all"] | None

_CLAUSES: Final = tuple(
    (phase, clause)
    for phase in ("prompt", "generation", "sequence")
    for clause in ("positions", "window", "tokens")
    if (phase, clause) != ("sequence", "tokens")
)


class SelectSpec(Wire):
    """Rows = union of the includes, minus the union of the excludes; a phase that nothing names is not touched.

    Raises `SpecError` (E_SELECTION, or E_UNKNOWN_FIELD) for an empty spec, clause or list, an exclude of a phase
    that no include names, a negative position or window end outside the prompt phase, and a window that runs
    backwards.

    >>> spec = SelectSpec(prompt="all", generation="all", exclude_prompt_positions=[0])
    >>> str(spec)
    'prompt, generated, !prompt[0]'
    >>> SelectSpec.parse("prompt, generated, !prompt[0]") == spec
    True
    """

    root: ClassVar[str] = "select"
    bad_value: ClassVar[Code] = "E_SELECTION"

    prompt: All = None
    generation: All = None
    prompt_positions: Positions = None
    generation_positions: Positions = None
    sequence_positions: Positions = None
    prompt_window: Windows = None
    generation_window: Windows = None
    sequence_window: Windows = None
    prompt_tokens: Positions = None
    generation_tokens: Positions = None
    exclude_prompt_positions: Positions = None
    exclude_generation_positions: Positions = None
    exclude_sequence_positions: Positions = None
    exclude_prompt_window: Windows = None
    exclude_generation_window: Windows = None
    exclude_sequence_window: Windows = None
    exclude_prompt_tokens: Positions = None
    exclude_generation_tokens: Positions = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for prefix in ("", "exclude_"):
            for phase, clause in _CLAUSES:
                name = f"{prefix}{phase}_{clause}"
                _check_clause(name, phase, clause, getattr(self, name))
        included = self.phases
        if not included:
            raise ValueError("names no rows: include some, e.g. prompt='all' or 'prompt[-1]'")
        for phase, clause in _CLAUSES:
            if getattr(self, f"exclude_{phase}_{clause}") is None or phase == "sequence":
                continue  # a sequence exclude names both phases, and some include stands
            if phase not in included:
                raise SpecError(
                    "E_SELECTION",
                    f"exclude_{phase}_{clause}",
                    f"excludes {phase} rows, which no include names: include {phase}='all' or drop the exclude",
                )
        return self

    @property
    def phases(self) -> frozenset[str]:
        """The phases that an include names; a sequence clause names both."""
        found: set[str] = {phase for phase in ("prompt", "generation") if getattr(self, phase) is not None}
        for phase, clause in _CLAUSES:
            if getattr(self, f"{phase}_{clause}") is not None:
                found |= {"prompt", "generation"} if phase == "sequence" else {phase}
        return frozenset(found)

    @staticmethod
    def generated_of(spec: SelectSpec | None) -> SelectSpec:
        """What a selection (None: every row) selects of the generation phase alone.

        >>> str(SelectSpec.generated_of(SelectSpec.parse("sequence[2:]"))), str(SelectSpec.generated_of(None))
        ('sequence[2:], !prompt[0:]', 'generated')
        """
        if spec is None:
            return SelectSpec(generation="all")
        return spec.model_copy(update={"exclude_prompt_window": ((0, None),)}) if "prompt" in spec.phases else spec

    @classmethod
    def parse(cls, text: str, path: str = "select") -> SelectSpec:
        """The row grammar as a SelectSpec: `prompt, generated, !prompt[0]`, `sequence[17]`, `prompt{128000}`."""
        return cls.of(_parse(text, path), path)

    @classmethod
    def read(cls, value: SelectSpec | str | dict[str, Any] | None, path: str = "select") -> SelectSpec | None:
        """A spec from any form that a caller may give: grammar, object, spec; `None` (every row) stays."""
        if value is None:
            return None
        if isinstance(value, str):
            return cls.parse(value, path)
        return cls.of(value, path)

    def canonical(self) -> dict[str, Any]:
        """The object with only the clauses that are set: what is stored, hashed and sent."""
        return self.model_dump(mode="json", exclude_none=True)

    def __str__(self) -> str:
        return ", ".join(_terms(self, "") + ["!" + term for term in _terms(self, "exclude_")])


def _clauses(value: SelectSpec | None) -> dict[str, Any] | None:
    return None if value is None else value.canonical()


Selection = Annotated[
    SelectSpec | None,
    BeforeValidator(lambda value: SelectSpec.read(value, ""), json_schema_input_type=str | SelectSpec | None),
    PlainSerializer(_clauses),
]
"""A field that takes any form of a selection, and is written as its object; None is every row."""


def _check_clause(name: str, phase: str, clause: str, value: Any) -> None:
    """Refuse negative ids and ends where they mean nothing, and windows that run backwards."""
    if value is None:
        return
    if clause == "window":
        for start, stop in value:
            if phase != "prompt" and (start < 0 or (stop is not None and stop < 0)):
                raise SpecError("E_SELECTION", name, "negative ends count from the end of the prompt: prompt only")
            if stop == 0 or (stop is not None and (start < 0) == (stop < 0) and stop <= start):
                raise SpecError("E_SELECTION", name, f"window [{start}, {stop}] holds no position")
    elif value[0] < 0 and not (clause == "positions" and phase == "prompt"):
        what = "token ids are not negative" if clause == "tokens" else "negative positions: prompt only"
        raise SpecError("E_SELECTION", name, f"{what}, got {value[0]}")


# --- the row grammar ---------------------------------------------------------------------------------------

_NAMES: Final = {"prompt": "prompt", "generated": "generation", "sequence": "sequence"}
_TERM: Final = re.compile(
    r"(?P<no>!)?\s*(?P<phase>prompt|generated|sequence)\s*"
    r"(?:\[\s*(?P<inside>[^\]]*?)\s*\]|\{\s*(?P<tokens>[^}]*?)\s*\})?\s*"
)
_HELP: Final = "terms are prompt, generated, sequence, prompt[-1], prompt[0:5], generated[3:], prompt{5,7}, !prompt[0]"


def _parse(text: str, path: str) -> dict[str, Any]:
    """The grammar's terms gathered into the clauses of the object form."""
    clauses: dict[str, Any] = {}
    place = 0
    while True:
        match = _TERM.match(text, place + len(text[place:]) - len(text[place:].lstrip()))
        if match is None:
            raise SpecError("E_SELECTION", path, f"cannot read {text[place:].strip()!r:.60} in {text!r:.80}: {_HELP}")
        _add_term(clauses, match, path)
        place = match.end()
        if place == len(text):
            return clauses
        if text[place] != ",":
            raise SpecError("E_SELECTION", path, f"cannot read {text[place:]!r:.60} in {text!r:.80}: {_HELP}")
        place += 1


def _add_term(clauses: dict[str, Any], match: re.Match[str], path: str) -> None:
    phase, prefix = _NAMES[match["phase"]], "exclude_" if match["no"] else ""
    # `sequence` alone and sequence{…} stand for both phases: the object has no clause of that name
    both = ("prompt", "generation") if phase == "sequence" else (phase,)
    if match["tokens"] is not None:
        for one in both:
            clauses.setdefault(f"{prefix}{one}_tokens", []).extend(_ints(match["tokens"].split(","), match, path))
    elif match["inside"] is None:
        if prefix:
            raise SpecError("E_SELECTION", path, f"{match[0].strip()!r} excludes a whole phase: leave it out instead")
        clauses.update(dict.fromkeys(both, "all"))
    elif ":" in match["inside"]:
        start, _, stop = match["inside"].partition(":")
        window = [*_ints([start or "0"], match, path), *(_ints([stop], match, path) if stop.strip() else [None])]
        clauses.setdefault(f"{prefix}{phase}_window", []).append(window)
    else:
        clauses.setdefault(f"{prefix}{phase}_positions", []).extend(_ints([match["inside"]], match, path))


def _ints(words: list[str], match: re.Match[str], path: str) -> list[int]:
    if not all(re.fullmatch(r"\s*-?\d{1,18}\s*", word) for word in words):
        raise SpecError("E_SELECTION", path, f"cannot read {match[0].strip()!r:.60}: {_HELP}")
    return [int(word) for word in words]


def _terms(spec: SelectSpec, prefix: str) -> list[str]:
    """The grammar's terms for the includes (prefix "") or the excludes of `spec`."""
    terms: list[str] = []
    for name, phase in _NAMES.items():
        if not prefix and phase != "sequence" and getattr(spec, phase) is not None:
            terms.append(name)
        terms += [f"{name}[{p}]" for p in getattr(spec, f"{prefix}{phase}_positions") or ()]
        for start, stop in getattr(spec, f"{prefix}{phase}_window") or ():
            terms.append(f"{name}[{start}:{'' if stop is None else stop}]")
        if phase != "sequence" and (tokens := getattr(spec, f"{prefix}{phase}_tokens")):
            terms.append(f"{name}{{{','.join(map(str, tokens))}}}")
    return terms


# --- resolving ---------------------------------------------------------------------------------------------


def resolve(spec: SelectSpec | None, rows: Rows) -> Bools:
    """Which rows of the table `spec` selects, `[rows]`; `None` selects every row.

    Rows may be of any requests, in any order, any part of a sequence: a row is judged by its own position,
    token id and `prompt_len` alone. A position that a prompt does not have selects nothing.
    """
    if spec is None:
        return np.ones(len(rows.position), dtype=np.bool_)
    return _union(spec, "", rows) & ~_union(spec, "exclude_", rows)


def each_select(
    common: SelectSpec | None, each: Sequence[SelectSpec | None] | None, count: int
) -> Sequence[SelectSpec | None]:
    """One selection per prompt: its own, else the common one."""
    if each is None:
        return [common] * count
    if len(each) != count:
        raise spec_error("E_SELECTION", "per_prompt_rows", f"{len(each)} row selections for {count} prompts")
    return [common if one is None else one for one in each]


def _union(spec: SelectSpec, prefix: str, rows: Rows) -> Bools:
    position, prompt_len = rows.position, rows.prompt_len
    in_prompt = position < prompt_len
    everywhere = np.ones(len(position), dtype=np.bool_)
    found = ~everywhere
    for phase, inside, offset in (
        ("prompt", in_prompt, position),
        ("generation", ~in_prompt, position - prompt_len),
        ("sequence", everywhere, position),
    ):
        if not prefix and phase != "sequence" and getattr(spec, phase) is not None:
            found |= inside
        places = getattr(spec, f"{prefix}{phase}_positions")
        if places is not None:
            found |= inside & (np.isin(offset, places) | np.isin(offset - prompt_len, [p for p in places if p < 0]))
        for start, stop in getattr(spec, f"{prefix}{phase}_window") or ():
            first = start + prompt_len if start < 0 else start
            after = offset >= first
            if stop is not None:
                after &= offset < (stop + prompt_len if stop < 0 else stop)
            found |= inside & after
        if phase != "sequence" and (tokens := getattr(spec, f"{prefix}{phase}_tokens")) is not None:
            found |= inside & np.isin(rows.token_id, tokens)
    return found
