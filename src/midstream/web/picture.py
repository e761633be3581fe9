"""What a heat map shows, apart from how it is drawn: one number for each layer and token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from midstream.core.errors import choices, spec_error
from midstream.core.sites import Site

if TYPE_CHECKING:
    from midstream.core.result import CaptureResult, TokenRow

Floats = NDArray[np.float64]

MASSIVE: Final = 8.0
"""From this many times the layer's median on, a row is drawn as a massive activation: past the colour scale."""

_LIMITS: Final = (1.25, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True)
class SamplePicture:
    """One prompt. norms: `[layers, tokens]` of the tokens that are shown; rows: how many it has in all."""

    index: int
    tokens: tuple[TokenRow, ...]
    generated: tuple[bool, ...]
    norms: Floats
    rows: int


@dataclass(frozen=True)
class Picture:
    """The norm of every row that is shown, beside the median norm of its layer over the whole capture.

    medians: `[layers]`. limit: where the colour scale ends, as a factor of the median in both directions. samples:
    those shown; prompts: how many the capture has; left_out: how many of them have rows but are not shown.
    """

    site: Site
    layers: tuple[int, ...]
    medians: Floats
    limit: float
    samples: tuple[SamplePicture, ...]
    prompts: int
    left_out: int

    def ratios(self, sample: SamplePicture) -> Floats:
        """`[layers, tokens]`: each norm as a factor of its layer's median; NaN where there is none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            found = sample.norms / self.medians[:, None]
        return np.where(np.isfinite(found), found, np.nan)


def picture_of(capture: CaptureResult, site: str | None, *, most_tokens: int, most_cells: int) -> Picture:
    """The picture of one site; of long prompts the first tokens, and prompts until there are enough cells.

    Raises E_SITE for a site that the capture has not, and for none when it has several; E_SELECTION for a capture
    without rows.
    """
    chosen = chosen_site(capture, site)
    norms = row_norms(capture, chosen)
    if not norms or not len(capture.labels):
        why = "has no rows to draw" if capture.labelled else "has rows without token ids, which cannot be drawn"
        raise spec_error("E_SELECTION", "rows", f"this capture {why}: capture again, with other rows")
    layers = tuple(norms)
    table = np.stack([norms[layer] for layer in layers])
    samples: list[SamplePicture] = []
    cells, left_out = 0, 0
    for index in (sample for sample in range(len(capture)) if sample not in capture.errors):
        mine = np.flatnonzero(capture.labels.sample == index)
        if not len(mine):
            continue
        shown = mine[:most_tokens]
        cells += len(shown) * len(layers)
        if samples and cells > most_cells:
            left_out += 1
            continue
        generated = tuple(capture.labels.generated[shown].tolist())
        tokens = tuple(capture.tokens(index)[: len(shown)])
        samples.append(SamplePicture(index, tokens, generated, table[:, shown], len(mine)))
    medians = np.array([median(row) for row in table])
    picture = Picture(chosen, layers, medians, 1.0, tuple(samples), len(capture), left_out)
    return replace(picture, limit=_limit(np.concatenate([picture.ratios(sample).ravel() for sample in samples])))


def chosen_site(capture: CaptureResult, site: str | None) -> Site:
    """The site that is meant: the one given, or the only one there is; else E_SITE, naming what there is."""
    if site is None and len(capture.sites) == 1:
        return capture.sites[0]
    for one in capture.sites:
        if one == site:
            return one
    asked = "which site?" if site is None else f"no site {site!r};"
    raise spec_error("E_SITE", "site", f"{asked} this capture has: {choices(capture.sites)}")


def row_norms(capture: CaptureResult, site: Site) -> dict[int, Floats]:
    """Layer → the norm of each of its rows at one site, `[rows]`, computed in float64; layers ascending."""
    layers = [layer for layer in capture.layer_ids if (site, layer) in capture.tensors]
    return {layer: capture.rows(layer, site).double().norm(dim=-1).numpy() for layer in layers}


def median(values: Floats) -> float:
    """The median of the finite values; NaN when there is none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else float("nan")


def _limit(ratios: Floats) -> float:
    """The round factor that all but the twentieth of the ordinary cells stay within."""
    ordinary = np.abs(np.log2(ratios[np.isfinite(ratios) & (ratios > 0) & (ratios < MASSIVE)]))
    reach = 2 ** float(np.quantile(ordinary, 0.95)) if len(ordinary) else 1.0
    return next((limit for limit in _LIMITS if reach <= limit), _LIMITS[-1])


def token_text(token: TokenRow) -> str:
    """A token's text, or its id where there is no tokenizer."""
    return str(token.token_id) if token.text is None else token.text


def whole_text(tokens: Sequence[TokenRow]) -> str:
    """Tokens as one text, or ids with spaces between where there is no tokenizer."""
    return ("" if tokens and tokens[0].text is not None else " ").join(map(token_text, tokens))
