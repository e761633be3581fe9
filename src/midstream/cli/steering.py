"""`--steer` and what goes with it, as one InterventionSpec that knows which file each of its ops is from."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .options import layer_ids
from .output import number, print_table, say, spread

if TYPE_CHECKING:
    from midstream.core.errors import SpecError
    from midstream.core.interventions import InterventionSpec, OpReceipt
    from midstream.formats.vectors import VectorFile

VECTOR_KINDS: Final = ("add", "ablate", "clamp", "replace")
"""What can be done with one vector for each layer; the other kinds come as a whole InterventionSpec."""

_TAKEN_BY: Final[Mapping[str, Sequence[str]]] = {
    "layers": VECTOR_KINDS,
    "rows": VECTOR_KINDS,
    "strength": ("add", "ablate", "replace"),
    "value": ("clamp",),
    "norm_match": ("add",),
}
_LINES: Final = 12


@dataclass(frozen=True)
class Source:
    """Where an op is from: its file, and its place among the ops of a whole InterventionSpec."""

    file: str
    place: int | None = None


@dataclass(frozen=True)
class Steering:
    """What a command line asks for: a spec, or None, and the source of each op."""

    spec: InterventionSpec | None
    sources: Sequence[Source]

    @contextmanager
    def named(self) -> Iterator[None]:
        """While open, an error that names an op by its place in the spec gets the file instead."""
        from midstream.core.errors import SpecError

        try:
            yield
        except SpecError as error:
            match = re.match(r"steering(?:\[\d+\])?\.ops\[(\d+)\]\.?", error.path)
            if match is None or int(match[1]) >= len(self.sources):
                raise
            source = self.sources[int(match[1])]
            rest = "" if source.place is None else f"ops[{source.place}].{error.path[match.end() :]}".rstrip(".")
            raise _of_file(error, source.file, rest) from error

    def as_json(self) -> dict[str, Any] | None:
        """The spec, tensors by id, and the files that it was made from."""
        if self.spec is None:
            return None
        files = list(dict.fromkeys(source.file for source in self.sources))
        return {"files": files, **self.spec.described()}

    def report(self, receipts: Sequence[Sequence[OpReceipt]]) -> None:
        """What each op did at each layer, over all prompts, as a short table on stderr."""
        from midstream.core.interventions import receipts_together

        together = receipts_together(receipts)
        if self.spec is None or not together:
            return
        rows = [
            [
                str(one.op),
                one.kind,
                one.site,
                str(one.layer),
                str(one.selected),
                str(one.computed),
                str(one.reused),
                f"not applied: {one.skipped}" if one.skipped else "–" if one.relative is None else number(one.relative),
                self._named_op(one.op),
            ]
            for one in spread(together, _LINES)
        ]
        columns = ["op", "kind", "site", "layer", "selected", "computed", "reused", "‖change‖/‖row‖", "from"]
        print_table(columns, rows, words=("from",), file=sys.stderr)
        some = f" {len(rows)} of {len(together)} lines are shown; --json has all." if len(rows) < len(together) else ""
        say(f"‖change‖/‖row‖: the mean over the computed rows; of add it is s·‖v‖/‖resid‖.{some}")

    def _named_op(self, place: int) -> str:
        """The file of an op, with its strength or value."""
        assert self.spec is not None, "a spec has ops"
        op, source = self.spec.ops[place], self.sources[place]
        amount = getattr(op, "strength", None)
        amount = f" × {amount:g}" if amount is not None else f" = {op.value:g}" if op.kind == "clamp" else ""  # pyright: ignore[reportAttributeAccessIssue]
        return f"{Path(source.file).name}{amount}"


def receipts_as_json(receipts: Sequence[OpReceipt]) -> list[dict[str, Any]]:
    """Each receipt with all its fields."""
    return [asdict(one) for one in receipts]


def given_steering(
    files: Sequence[str] | None,
    *,
    strength: Sequence[float] | None,
    layers: Sequence[str] | None,
    rows: Sequence[str] | None,
    kind: Sequence[str] | None,
    value: Sequence[float] | None,
    norm_match: bool,
    prefix: str = "--",
) -> Steering:
    """The files of `--steer`, in order, as one spec.

    Each of the others is given once for all vector files that take it, or once for each of them, in order. prefix: of
    the options for layers and rows. Raises SpecError, FileFormatError or OSError, naming the option or the file.
    """
    from midstream.core.errors import choices, spec_error
    from midstream.core.interventions import InterventionSpec

    given: dict[str, Sequence[Any] | None] = {
        "strength": strength,
        "layers": None if layers is None else [layer_ids([one], f"{prefix}layers") for one in layers],
        "rows": rows,
        "value": value,
        "norm_match": [True] if norm_match else None,
    }
    names = {name: f"{prefix if name in ('layers', 'rows') else '--'}{name.replace('_', '-')}" for name in given}
    if not files:
        idle = [names[name] for name, values in given.items() if values] + (["--kind"] if kind else [])
        if idle:
            raise spec_error("E_BAD_PARAM", idle[0], "changes nothing without --steer FILE")
        return Steering(None, ())
    read = [read_steering(file) for file in files]
    vectors = [place for place, one in enumerate(read) if not isinstance(one, InterventionSpec)]
    kinds = dict.fromkeys(vectors, "add") | _each(kind, vectors, "--kind", "vector file")
    if strange := [one for one in kinds.values() if one not in VECTOR_KINDS]:
        message = f"no kind {strange[0]!r} of vectors; there are: {choices(VECTOR_KINDS)}; others come as a .json spec"
        raise spec_error("E_UNKNOWN_KIND", "--kind", message)
    options: dict[int, dict[str, Any]] = {place: {} for place in vectors}
    for name, values in given.items():
        takers = [place for place in vectors if kinds[place] in _TAKEN_BY[name]]
        what = "vector file" if _TAKEN_BY[name] == VECTOR_KINDS else f"vector file to {' or '.join(_TAKEN_BY[name])}"
        for place, one in _each(values, takers, names[name], what).items():
            options[place][name] = one
    specs: list[InterventionSpec] = []
    sources: list[Source] = []
    for place, (file, one) in enumerate(zip(files, read, strict=True)):
        if isinstance(one, InterventionSpec):
            specs.append(one)
            sources += [Source(file, at) for at in range(len(one.ops))]
        else:
            specs.append(_of_vectors(file, one, kinds[place], options[place], names))
            sources.append(Source(file))
    return Steering(InterventionSpec(ops=tuple(op for spec in specs for op in spec.ops)), sources)


def _each(values: Sequence[Any] | None, takers: Sequence[int], option: str, what: str) -> dict[int, Any]:
    """Place of a file → its value, when there is one value for all or one for each."""
    from midstream.core.errors import spec_error

    if not values:
        return {}
    if not takers:
        raise spec_error("E_BAD_PARAM", option, f"changes nothing: no --steer is a {what}")
    if len(values) not in (1, len(takers)):
        message = (
            f"given {len(values)} times, and there are {len(takers)} of: {what}. Give it once for all, or for each"
        )
        raise spec_error("E_BAD_PARAM", option, message)
    return dict(zip(takers, values if len(values) > 1 else [values[0]] * len(takers), strict=True))


def read_steering(file: str) -> VectorFile | InterventionSpec:
    """A whole InterventionSpec, which is a .json object with `ops`, or else a vector file."""
    from midstream.core.errors import SpecError
    from midstream.formats.spec_json import decode_spec
    from midstream.formats.vectors import read_vectors

    found = _ops_of(Path(file))
    if found is None:
        return read_vectors(file)
    try:
        return decode_spec(found)
    except SpecError as error:
        raise _of_file(error, file, error.path.removeprefix("steering").lstrip(".")) from error


def _ops_of(path: Path) -> dict[str, Any] | None:
    """The object in a .json file, when it is a spec's; what is wrong with others, their reader says."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    if isinstance(found, dict) and not found.keys() & {"ops", "activations"}:
        from midstream.core.errors import FileFormatError

        message = "neither an InterventionSpec, which has ops, nor vectors of vllm-lens, which have activations"
        raise FileFormatError(f"{path} is {message}; it has: {', '.join(found) or 'nothing'!s:.80}")
    return found if isinstance(found, dict) and "ops" in found else None


def _of_vectors(
    file: str, vectors: VectorFile, kind: str, given: Mapping[str, Any], names: Mapping[str, str]
) -> InterventionSpec:
    """One op of a vector file; an error names the option that is wrong, or the file."""
    from midstream import steering
    from midstream.core.errors import SpecError, spec_error

    if kind == "clamp" and "value" not in given:
        raise spec_error("E_BAD_PARAM", "--value", "clamp wants the projection that rows shall have, e.g. --value 0")
    try:
        return getattr(steering, kind)(vectors, **given)
    except SpecError as error:
        field = error.path.removeprefix(f"{kind}.").partition("[")[0].partition(".")[0]
        if option := names.get({"scope": "rows"}.get(field, field)):
            message = f"{error.message} ({file})" if field == "layers" else error.message
            raise spec_error(error.code, option, message) from error
        more = ": write a .json spec with heads" if field == "heads" else ""
        raise _of_file(error, file, "", more) from error


def _of_file(error: SpecError, file: str, rest: str, more: str = "") -> SpecError:
    from midstream.core.errors import spec_error

    return spec_error(error.code, f"--steer {file}" + (f": {rest}" if rest else ""), error.message + more)
