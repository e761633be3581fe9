"""A capture as a heat map: a page to explore, and a picture to paste.

Both show the norm of each row as a factor of the median norm of its layer, on a logarithmic colour scale: norms grow
with depth in most models, and a few rows (often the first token's) are a hundred times larger than the rest, so
plain norms would show that and nothing else.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .page import page
from .picture import picture_of

if TYPE_CHECKING:
    from midstream.core.result import CaptureResult

MOST_TOKENS: Final = 160
MOST_CELLS: Final = 60_000
"""A page of about 3 MB; what is left out is said on it."""


def heatmap_html(capture: CaptureResult, site: str | None = None) -> str:
    """One self-contained HTML page: for each prompt a table of layers × tokens, coloured by `norm / median norm`.

    site: needed when the capture has several. It loads nothing from anywhere; texts are escaped. Raises E_SITE for a
    site that is not there, E_SELECTION for a capture without rows.
    """
    picture = picture_of(capture, site, most_tokens=MOST_TOKENS, most_cells=MOST_CELLS)
    return page(picture, model=capture.model_ref)


def heatmap_png(capture: CaptureResult, path: str | PathLike[str], site: str | None = None) -> Path:
    """Write the heat map of the first prompts as a PNG, atomically; needs matplotlib (`midstream[demo]`).

    Raises as `heatmap_html` does, MidstreamError where matplotlib is not installed, OSError as every writer here.
    """
    from .plot import write_png

    picture = picture_of(capture, site, most_tokens=40, most_cells=6 * 40 * len(capture.layer_ids))
    return write_png(picture, capture.model_ref, path)
