"""Are a model's captured rows right? Site by site and layer by layer, against the reference (SEMANTICS.md, "Equal").

REF is `taps/reference.py` on the model in float32. The rows under test are those of `session.capture`: of the prompts
in one padded batch, and of what is generated after them through the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from midstream.core.backend import Progress
from midstream.core.capture import CaptureSpec
from midstream.core.errors import CaptureError
from midstream.core.generation import GenerationParams
from midstream.core.prompts import PreparedPrompt
from midstream.core.result import CaptureResult
from midstream.core.sites import Site
from midstream.taps.reference import reference

from .selftest import examine
from .session import HuggingFaceSession

EXACT: Final = 1e-5
"""float32: the largest |difference| of a row, over the row's largest value or 1."""
FACTOR, ALLOWANCE = 1.25, 1e-3
"""bfloat16 and float16: how much further from REF than the plain model a row may be."""
QUANTILES: Final = (0.5, 0.99)

Rows = Mapping[tuple[Site, int], Tensor]


@dataclass(frozen=True)
class SiteParity:
    """How well one site of one layer agrees with REF.

    cosine: the lowest of any row. difference: the largest of any row's largest |difference|, over the row's largest
    value or 1. errors: norm of the difference over norm of the row, at the 50th and 99th percentile of rows. limits:
    what `errors` may be, or, for float32, what `difference` may be.
    """

    site: Site
    layer: int
    rows: int
    cosine: float
    difference: float
    errors: tuple[float, float]
    limits: tuple[float, ...]
    holds: bool


def judge(site: Site, layer: int, got: Tensor, want: Tensor, plain: Tensor | None = None) -> SiteParity:
    """`got` beside REF's rows `want`, both `[rows, width]`.

    plain: the same rows of the plain model where it computes in bfloat16 or float16, whose distance from REF sets the
    limit; None for a float32 model. NaN, infinities and other shapes never hold.
    """
    if got.shape != want.shape or (plain is not None and plain.shape != want.shape):
        nothing = float("nan")
        return SiteParity(site, layer, len(want), nothing, nothing, (nothing, nothing), (), False)
    got, want = got.double(), want.double()
    scale = want.abs().amax(dim=-1).clamp(min=1)
    difference = float(((got - want).abs().amax(dim=-1) / scale).max())
    errors = _errors(got, want)
    if plain is None:
        limits: tuple[float, ...] = (EXACT,)
        holds = difference <= EXACT
    else:
        limits = tuple(FACTOR * error + ALLOWANCE for error in _errors(plain.double(), want))
        holds = all(error <= limit for error, limit in zip(errors, limits, strict=True))
    return SiteParity(site, layer, len(want), _lowest_cosine(got, want), difference, errors, limits, holds)


def _errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Relative row errors at the two percentiles; a row of zeros counts as one of norm 1e-12."""
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-12)
    median, high = (float(torch.quantile(errors, quantile, interpolation="higher")) for quantile in QUANTILES)
    return median, high


def _lowest_cosine(got: Tensor, want: Tensor) -> float:
    both_zero = (got == 0).all(dim=-1) & (want == 0).all(dim=-1)
    cosines = torch.nn.functional.cosine_similarity(got, want, dim=-1, eps=1e-30).masked_fill(both_zero, 1.0)
    return float(cosines.min())


def verify(
    session: HuggingFaceSession,
    prompts: Sequence[PreparedPrompt],
    *,
    sites: Sequence[Site] | None = None,
    layers: Sequence[int] | None = None,
    max_tokens: int = 8,
    progress: Progress | None = None,
) -> list[SiteParity]:
    """The parity of every site and layer (None: all that the model has), in the order of sites, then layers.

    The prompts are captured together with `max_tokens` tokens generated after each, and once more alone; REF then
    reads each sequence by itself. A model that is not in float32 is copied in float32 meanwhile, so that memory must
    hold three times a bfloat16 model. Raises as `session.capture` does.
    """
    model: Any = session.model
    taps = examine(model)
    wanted: tuple[Site, ...] = tuple(sites or (site for site, found in taps.layouts.items() if found))
    spec = CaptureSpec(sites=wanted, layers=None if layers is None else tuple(layers), dtype="float32")
    places = session.site_layers(spec)
    params = GenerationParams(max_tokens=max_tokens, ignore_eos=True)
    results = [session.capture(prompts, spec, params=params), session.capture(prompts, spec)]
    exact = model.dtype in (torch.float32, torch.float64)
    oracle = taps if exact else examine(deepcopy(model).float())
    seen: dict[tuple[Site, int], list[tuple[Tensor, ...]]] = {}
    total = sum(len(result.labels) for result in results)
    done = 0
    for result in results:
        for sample, prompt in enumerate(prompts):
            ids = _sequence(result, sample)
            inputs = dict(prompt.multi_modal_data)
            compared = [_captured(result, sample), reference(oracle, ids, places, **inputs)]
            if not exact:
                compared.append(reference(taps, ids, places, **inputs))
            for place in compared[1]:
                seen.setdefault(place, []).append(tuple(rows[place] for rows in compared))
            done += len(ids)
            if progress is not None:
                progress(done, total)
    return [
        judge(site, layer, *(torch.cat(parts) for parts in zip(*seen[site, layer], strict=True)))
        for site, of_site in places.items()
        for layer in of_site
    ]


def _sequence(result: CaptureResult, sample: int) -> list[int]:
    """The token ids of a sample's rows, when they are all there, in order."""
    if sample in result.errors:
        raise result.errors[sample]
    positions = result.sample_positions(sample).tolist()
    if positions != list(range(len(positions))):
        raise CaptureError(f"sample {sample} has rows at positions {positions[:8]}…, not at each from 0 on")
    output = result.outputs[sample]
    ids = [*output.prompt_token_ids, *output.token_ids[:-1]]
    if result.sample_token_ids(sample).tolist() != ids:
        raise CaptureError(f"sample {sample}: its rows are labelled with other tokens than it was given and generated")
    return ids


def _captured(result: CaptureResult, sample: int) -> Rows:
    return {(site, layer): rows for site in result.sites for layer, rows in result.sample(sample, site).items()}
