"""A harvest: everything checked, then what of it is not in the directory yet computed and written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

from midstream.core.errors import MidstreamError, PromptError
from midstream.core.probe import Probe
from midstream.core.prompts import prepare
from midstream.formats.records import Record
from midstream.language_model import LanguageModel

from . import inputs
from .identity import Subject, capture_of, compiles, identity_of
from .manifest import Counts
from .pipeline import Pipeline, Told
from .places import place_of
from .planning import Planner
from .sequences import Ids, too_long
from .spec import HarvestSpec
from .writing import Writer


@dataclass(frozen=True)
class Report:
    """What a run did. counts: of the whole harvest. made, tokens, seconds: what this run computed."""

    place: str
    counts: Counts
    shards: int
    made: int
    tokens: int
    seconds: float


def run(
    lm: LanguageModel,
    prompts: Any,
    out: str | PathLike[str],
    spec: HarvestSpec,
    *,
    probes: Sequence[Probe] = (),
    trust: bool = False,
    refuse_nonfinite: bool = False,
    compiled: bool | None = None,
    told: Told | None = None,
) -> Report:
    """Harvest `prompts` (see inputs.opened) into `out`, a directory or a URL of fsspec: what of it is not there yet.

    trust: of shards that are there, compare the sizes alone. refuse_nonfinite: CaptureError, before it is written, for
    a shard with NaN or infinite values. compiled: whether the model's blocks are compiled, which pays for long runs;
    None decides by the input and the spec. Raises what the model or the input cannot give before anything is computed;
    OtherHarvestError where another harvest is there, BusyError where one runs.
    """
    place = place_of(out)
    titles = [one.title for one in probes]
    if twice := sorted({name for name in titles if titles.count(name) > 1}):
        raise MidstreamError(f"two probes are called {twice[0]}: name them apart")
    spec = spec.model_copy(update={"capture": capture_of(probes, spec.capture)})
    subject = Subject.of(lm, spec, probes)
    with inputs.opened(prompts) as given, place.locked():
        planner = _planner(subject, spec)
        scanned = inputs.scan(given, _checker(planner, subject))
        compiled = compiles(lm, spec, scanned, compiled)
        identity = identity_of(subject, spec, probes, scanned, compiled=compiled)
        writer = Writer.on(place, identity, spec.pool, tuple(probes), refuse_nonfinite)
        pipeline = Pipeline(subject, planner, given, scanned, writer, compiled)
        pipeline.finish(trust, told)
    manifest, clock = writer.manifest, pipeline.clock
    return Report(str(place), manifest.counts, len(manifest.shards), writer.made, clock.tokens, clock.seconds)


def _planner(subject: Subject, spec: HarvestSpec) -> Planner:
    tokenizer = subject.lm.tokenizer

    def prepared(record: Record) -> Ids:
        one = prepare(record.prompt, tokenizer, name=record.source, add_special_tokens=spec.add_special_tokens)
        if one.multi_modal_data:
            raise PromptError(f"{record.source} has images or the like, and a harvest reads text")
        return one.token_ids

    return Planner(spec, prepared, subject.context, subject.row_bytes)


def _checker(planner: Planner, subject: Subject) -> Callable[[Record, int], None]:
    """Refuses, before the model runs, what could not be harvested.

    Of texts only those are tokenised that may be too long: a token is a byte at least (but where a normalizer makes
    more of a text, which is then noticed later), and the tokenizer adds a few of its own.
    """
    refuses = planner.spec.too_long == "refuse" and not planner.spec.packed
    vocabulary = subject.lm.facts.vocab_size

    def check(record: Record, size: int) -> None:
        text = isinstance(record.prompt, str) or "prompt" in record.prompt
        if text and not (refuses and size + 8 > planner.context):
            return
        ids = planner.prepare(record)
        if refuses and len(ids) > planner.context:
            raise too_long(record.source, len(ids), planner.context)
        if max(ids) >= vocabulary:
            raise PromptError(f"{record.source} has token {max(ids)}; the model has {vocabulary:,} tokens")

    return check
