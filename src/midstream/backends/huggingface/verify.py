"""Are a model's captured rows right? Site by site and layer by layer, against the reference (docs/semantics.md).

REF is `taps/reference.py` on the model in float32. The rows under test are those of `session.capture`: of the prompts
in one padded batch, and of what is generated after them through the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

import torch
from torch import Tensor

from midstream.core.backend import Progress, Session
from midstream.core.capture import CaptureSpec
from midstream.core.errors import CaptureError
from midstream.core.generation import GenerationParams
from midstream.core.prompts import PreparedPrompt
from midstream.core.result import CaptureResult
from midstream.core.sites import Site
from midstream.taps.reference import reference

from .selftest import examine

ACROSS: Final = 1e-4
"""float32: what a row's error may be. REF's attention is eager and a capture's is fused, so that the two are equal as
rows of two engines are; on deep models with massive activations they differ by more than those of one engine."""
FACTOR, ALLOWANCE = 1.25, 1e-3
"""bfloat16 and float16: how much further from REF than the plain model's row errors those of a capture may be."""

Rows = Mapping[tuple[Site, int], Tensor]


@dataclass(frozen=True)
class SiteParity:
    """How well one site agrees with REF, at one layer or (None) at all that were asked for together.

    cosine: the lowest of any row. difference: the largest |difference| of any row, over the row's largest value or 1.
    error: norm of the difference over norm of the row, at percentiles of the rows; limit: what it may be, None where
    that percentile is not judged (float32 judges the largest, the shorter types the other two).
    """

    site: Site
    layer: int | None
    rows: int
    cosine: float
    difference: float
    error_p50: float
    error_p99: float
    error_max: float
    limit_p50: float | None
    limit_p99: float | None
    limit_max: float | None

    @property
    def holds(self) -> bool:
        """Whether every row is finite and every error that is judged keeps its limit."""
        judged = (
            (self.error_p50, self.limit_p50), (self.error_p99, self.limit_p99), (self.error_max, self.limit_max),
        )  # fmt: skip
        return isfinite(self.error_max) and all(error <= limit for error, limit in judged if limit is not None)


@dataclass(frozen=True)
class RowErrors:
    """What is kept of rows `[rows, width]` that were compared with REF's: one number each. plain: see `compare`."""

    cosine: Tensor
    difference: Tensor
    error: Tensor
    plain: Tensor | None


def compare(got: Tensor, want: Tensor, plain: Tensor | None = None) -> RowErrors:
    """`got` beside REF's rows `want`, both `[rows, width]`.

    plain: the same rows of the plain model, where that computes in bfloat16 or float16. Raises CaptureError for
    shapes that differ.
    """
    if got.shape != want.shape or (plain is not None and plain.shape != want.shape):
        raise CaptureError(f"captured rows {list(got.shape)} where the reference has {list(want.shape)}")
    got, want = got.double(), want.double()
    both_zero = (got == 0).all(dim=-1) & (want == 0).all(dim=-1)
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=-1, eps=1e-30).masked_fill(both_zero, 1.0)
    difference = (got - want).abs().amax(dim=-1) / want.abs().amax(dim=-1).clamp(min=1)
    return RowErrors(
        cosine, difference, _row_error(got, want), None if plain is None else _row_error(plain.double(), want)
    )


def _row_error(got: Tensor, want: Tensor) -> Tensor:
    """Relative row errors `[rows]`; a row of zeros counts as one of norm 1e-12."""
    return (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-12)


def judge(site: Site, layer: int | None, parts: Sequence[RowErrors], *, tail: bool = True) -> SiteParity:
    """The verdict over the rows of several prompts.

    Where `plain` is known its distance from REF sets the limits at the 50th and (with `tail`) the 99th percentile;
    where it is not, no row may be further off than ACROSS.
    """
    error = torch.cat([part.error for part in parts])
    plain = [part.plain for part in parts if part.plain is not None]
    limits = [FACTOR * _quantile(torch.cat(plain), q) + ALLOWANCE for q in (0.5, 0.99)] if plain else [None, None]
    return SiteParity(
        site,
        layer,
        rows=len(error),
        cosine=float(torch.cat([part.cosine for part in parts]).min()),
        difference=float(torch.cat([part.difference for part in parts]).max()),
        error_p50=_quantile(error, 0.5),
        error_p99=_quantile(error, 0.99),
        error_max=float(error.max()),
        limit_p50=limits[0],
        limit_p99=limits[1] if tail else None,
        limit_max=None if plain else ACROSS,
    )


def _quantile(values: Tensor, quantile: float) -> float:
    """NaN when any value is."""
    return float(torch.quantile(values, quantile))


def verify(
    session: Session,
    prompts: Sequence[PreparedPrompt],
    model: Callable[[], Any],
    layouts: Mapping[Site, Container[int]],
    *,
    sites: Sequence[Site] | None = None,
    layers: Sequence[int] | None = None,
    max_tokens: int = 8,
    progress: Progress | None = None,
) -> list[SiteParity]:
    """The parity of every site and layer (None: all that the model has), in the order of sites, then layers.

    The prompts are captured together with `max_tokens` tokens generated after each, and once more alone; REF reads
    each sequence by itself. The 99th percentile means little below a thousand rows. model: gives the transformers
    model that REF reads, once all is captured; one that is not in float32 is copied in float32 meanwhile. layouts: what
    the session has, by site. Raises as `session.capture` does, and CaptureError for rows that are missing or labelled
    wrongly.
    """
    having: list[Site] = [site for site, found in layouts.items() if all(layer in found for layer in layers or ())]
    stream: tuple[Site, ...] = ("resid_post",)  # which has every layer: it names the range where a layer is absent
    wanted: tuple[Site, ...] = (*(sites or having or stream),)
    spec = CaptureSpec(sites=wanted, layers=None if layers is None else tuple(layers))
    results = [
        session.capture(prompts, spec, params=GenerationParams(max_tokens=count, ignore_eos=True))
        for count in dict.fromkeys((max_tokens, 1))
    ]
    places: dict[Site, tuple[int, ...]] = {site: tuple(found) for site, found in results[0].layouts.items()}
    compared = model()
    taps, exact = examine(compared), compared.dtype in (torch.float32, torch.float64)
    oracle = taps if exact else examine(deepcopy(compared).float())
    found: dict[tuple[Site, int], list[RowErrors]] = {}
    done, total = 0, len(results[0].labels)
    for sample, prompt in enumerate(prompts):
        ids, inputs = _sequence(results[0], sample), dict(prompt.multi_modal_data)
        want = reference(oracle, ids, places, **inputs)
        plain = {} if exact else reference(taps, ids, places, **inputs)
        for result in results:
            count, got = len(_sequence(result, sample)), _captured(result, sample)  # the prompt alone is a prefix
            for place, rows in want.items():
                beside = plain[place][:count] if plain else None
                found.setdefault(place, []).append(compare(got[place], rows[:count], beside))
        done += len(ids)
        if progress is not None:
            progress(done, total)
    return [one for site, layers_of in places.items() for one in _verdicts(site, layers_of, found, exact)]


def _verdicts(
    site: Site, layers: Sequence[int], found: Mapping[tuple[Site, int], list[RowErrors]], exact: bool
) -> list[SiteParity]:
    """One verdict per layer and, for the shorter types, one over all of them together.

    The 99th percentile of one layer is a handful of rows, which batching moves by more than the limit allows: it is
    judged over the layers together.
    """
    each = [judge(site, layer, found[site, layer], tail=exact) for layer in layers]
    together = [part for layer in layers for part in found[site, layer]]
    return each if exact else [*each, judge(site, None, together)]


def _sequence(result: CaptureResult, sample: int) -> list[int]:
    """The token ids of a sample's rows, when they are all there, in order."""
    if sample in result.errors:
        raise result.errors[sample]
    output = result.outputs[sample]
    ids = [*output.prompt_token_ids, *output.token_ids[:-1]]
    positions, labelled = result.sample_positions(sample).tolist(), result.sample_token_ids(sample).tolist()
    if positions != list(range(len(ids))) or labelled != ids:
        raise CaptureError(f"prompt {sample}: its rows are not labelled as the {len(ids)} tokens that the model read")
    return ids


def _captured(result: CaptureResult, sample: int) -> Rows:
    return {(site, layer): rows for site in result.sites for layer, rows in result.sample(sample, site).items()}
