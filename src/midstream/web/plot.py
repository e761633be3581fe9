"""The heat map as a PNG, drawn with matplotlib."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np

from midstream.core.errors import MidstreamError
from midstream.formats.atomic import replacing

from .picture import MASSIVE, Picture, SamplePicture, token_text
from .tokens import visible

_LOW, _MIDDLE, _HIGH, _MASSIVE, _MISSING = "#2166ac", "#f7f6f4", "#d9590b", "#4a1a6b", "#bbbbbb"
_PROMPTS: Final = 6
# all in inches
_CELL, _LINE = 0.34, 0.27
_MARGIN, _GAP, _WIDTH = 0.75, 0.3, 11.0
_TITLE, _HEADS, _SCALE, _NAME = 0.75, 1.2, 0.95, 0.75


def write_png(picture: Picture, model: str, path: str | PathLike[str]) -> Path:
    """The first prompts of `picture`, side by side while there is room, with one colour scale."""
    if find_spec("matplotlib") is None:
        raise MidstreamError("a PNG needs matplotlib; type: pip install 'midstream[demo]'")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places, width, height = _places(picture)
    figure = Figure(figsize=(width, height), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)  # no display is needed, and pyplot's global state is left alone
    _draw_words(figure, picture, model)
    for sample, (left, bottom) in zip(picture.samples, places, strict=False):
        size = len(sample.tokens) * _CELL / width, len(picture.layers) * _LINE / height
        _draw_sample(figure.add_axes((left / width, bottom / height, *size)), picture, sample)
    _draw_scale(figure, picture)
    with replacing(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a script that the font has not: a box
        figure.savefig(temporary, format="png")
    return Path(path)


def _places(picture: Picture) -> tuple[list[tuple[float, float]], float, float]:
    """Where each prompt's cells begin (left, bottom), in inches, and the size of the whole: shelves, as in a book."""
    samples = picture.samples[:_PROMPTS]
    wide = [len(sample.tokens) * _CELL + _MARGIN + _GAP for sample in samples]
    width = max(_WIDTH, *wide)
    shelves: list[list[int]] = []
    used = width
    for place, room in enumerate(wide):
        if used + room > width:
            shelves.append([])
            used = 0.0
        shelves[-1].append(place)
        used += room
    shelf = len(picture.layers) * _LINE + _HEADS
    height = _TITLE + len(shelves) * shelf + _SCALE
    places: list[tuple[float, float]] = []
    for row, members in enumerate(shelves):
        left = _MARGIN
        for place in members:
            places.append((left, height - _TITLE - (row + 1) * shelf))
            left += wide[place]
    return places, width, height


def _draw_words(figure: Any, picture: Picture, model: str) -> None:
    width, height = figure.get_size_inches()
    of = f" of {model}" if model else ""
    title = f"Row norms at {picture.site}{of}"
    figure.text(0.3 / width, 1 - 0.42 / height, title, fontsize=13, weight="bold", parse_math=False)
    words = "Each cell: the norm of one token's row at one layer, as a factor of that layer's median norm."
    figure.text(0.3 / width, 1 - 0.68 / height, words, fontsize=8.5, color="#555555")


def _draw_sample(axes: Any, picture: Picture, sample: SamplePicture) -> None:
    ratios = picture.ratios(sample)
    axes.imshow(_colours(ratios, picture.limit), aspect="auto", interpolation="nearest")
    for layer, token in zip(*np.nonzero(ratios >= MASSIVE), strict=True):
        text = f"{ratios[layer, token]:.0f}"
        axes.text(token, layer, text, color="white", fontsize=6, ha="center", va="center")
    texts = [visible(token_text(token), 12) for token in sample.tokens]
    axes.set_xticks(range(len(texts)), texts, rotation=45, ha="left", rotation_mode="anchor", parse_math=False)
    axes.xaxis.tick_top()
    axes.set_yticks(range(len(picture.layers)), [str(layer) for layer in picture.layers])
    axes.tick_params(length=0, labelsize=7, pad=2)
    axes.set_ylabel("layer", fontsize=7.5)
    name = f"Prompt {sample.index}"
    if len(sample.tokens) < sample.rows:
        name += f" (the first {len(sample.tokens)} of {sample.rows} rows)"
    axes.annotate(name, (0, 1), (0, _NAME * 72), "axes fraction", "offset points", fontsize=8.5, weight="bold")
    for edge in axes.spines.values():
        edge.set_visible(False)
    axes.set_xticks(np.arange(len(texts) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(picture.layers) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="minor", length=0)
    if True in sample.generated[1:]:
        axes.axvline(sample.generated.index(True) - 0.5, color="#222222", linewidth=1.2)


def _colours(ratios: Any, limit: float) -> Any:
    """`[layers, tokens, 4]`: blue below the median, orange above, at full strength from the limit on."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    scale = LinearSegmentedColormap.from_list("norms", [_LOW, _MIDDLE, _HIGH])
    with np.errstate(divide="ignore"):
        logs = np.clip(np.log2(np.nan_to_num(ratios, nan=1.0)) / np.log2(limit), -1, 1)
    colours = scale((logs + 1) / 2)
    colours[ratios >= MASSIVE] = to_rgba(_MASSIVE)
    colours[np.isnan(ratios)] = to_rgba(_MISSING)
    return colours


def _draw_scale(figure: Any, picture: Picture) -> None:
    """The legend, at the foot: the colour scale and what stands past it."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((_MARGIN / width, 0.42 / height, 3.2 / width, 0.16 / height))
    limit = picture.limit
    axes.imshow(_colours(np.geomspace(1 / limit, limit, 101)[None], limit), aspect="auto", extent=(0, 1, 0, 1))
    axes.set_yticks([])
    axes.set_xticks([0, 0.5, 1], [f"{1 / limit:.2g}× or less", "1×, the median", f"{limit:g}× or more"])
    axes.tick_params(length=2, labelsize=7.5)
    mark = figure.add_axes((5.2 / width, 0.42 / height, 0.32 / width, 0.16 / height))
    mark.imshow(_colours(np.array([[MASSIVE]]), limit), aspect="auto", extent=(0, 1, 0, 1))
    mark.text(0.5, 0.47, "126", color="white", fontsize=6.5, ha="center", va="center")
    mark.set_axis_off()
    text = f"massive activation: {MASSIVE:g}× or more; the number says how many times"
    if any(any(sample.generated) for sample in picture.samples):
        text += ".  Right of a black line: generated"
    figure.text(5.62 / width, 0.5 / height, text, fontsize=7.5, va="center")
