"""The heat map: what it shows, that texts cannot break out of it, and that it asks for nothing from elsewhere."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midstream.core.capture import Labels
from midstream.core.errors import MidstreamError, SpecError
from midstream.core.result import CaptureResult
from midstream.web import heatmap_html, heatmap_png
from midstream.web.page import colour_class
from midstream.web.picture import picture_of
from unit.captures import decode, made


def capture_with_norms(norms: dict[int, list[float]], **changes: Any) -> CaptureResult:
    """The capture of `made`, 8 rows of 3 prompts, with these row norms by layer."""
    capture = made(layers=tuple(norms), **changes)
    tensors: dict[Any, torch.Tensor] = {}
    for layer, values in norms.items():
        tensors["resid_post", layer] = torch.zeros(len(values), 4)
        tensors["resid_post", layer][:, 1] = torch.tensor(values)
    return replace(capture, tensors=tensors)


USUAL = {0: [1.0, 1, 1, 1, 2, 0.5, 1, 1], 2: [500.0, 10, 10, 10, 10, 10, 10, 10]}


class Page(HTMLParser):
    """The page's tags, and its tables as lists of rows of (tag, attributes, text)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[tuple[str, dict[str, str | None], str]]]] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append((tag, dict(attrs), ""))
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._cell = False

    def handle_data(self, data: str) -> None:
        if self._cell:
            tag, attrs, text = self.tables[-1][-1][-1]
            self.tables[-1][-1][-1] = (tag, attrs, text + data)


def test_a_table_for_each_prompt_a_line_for_each_layer() -> None:
    page = Page(heatmap_html(capture_with_norms(USUAL)))
    assert [len(table) for table in page.tables] == [3, 3, 3]
    first = page.tables[0]
    assert [text for _, _, text in first[0]] == ["layer", "<11>0", "<12>1", "<13>2", "<31>3", "<32>4", "median norm"]
    assert [line[0][2] for line in first[1:]] == ["0", "2"]
    assert [text for _, _, text in first[2][1:]] == ["50", "1.00", "1.00", "1.00", "1.00", "10"]
    assert [attrs.get("data-norm") for _, attrs, _ in first[2][1:3]] == ["500", "10"]
    assert first[2][1][1]["class"] == "x"
    assert first[1][5][2] == "2.00"
    assert page.tables[1][1][1][2] == "0.50"


def test_heads_say_what_their_cells_are() -> None:
    page = Page(heatmap_html(capture_with_norms(USUAL)))
    for table in page.tables:
        assert all(tag == "th" and attrs["scope"] == "col" for tag, attrs, _ in table[0])
        assert all(line[0][0] == "th" and line[0][1]["scope"] == "row" for line in table[1:])
        assert {len(line) for line in table} == {len(table[0])}
    heads = page.tables[0][0]
    assert heads[4][1]["title"] == "<31>: position 3, id 31, generated"
    assert heads[4][1]["class"] == "generated"
    assert "class" not in heads[3][1]


def test_nothing_is_asked_from_elsewhere_and_texts_stay_texts() -> None:
    def hostile(ids: Any) -> list[str]:
        return ["</script><script>alert(1)</script>\"'><img src=http://x/y onerror=alert(1)>&amp;" for _ in ids]

    capture = replace(capture_with_norms(USUAL), decode=hostile, model_ref="<b>model</b>")
    text = heatmap_html(capture)
    page = Page(text)
    names = [tag for tag, _ in page.tags]
    assert names.count("script") == 1
    assert not {"img", "b", "link", "iframe", "object", "base", "form"} & set(names) - {"b"}
    assert names.count("b") == 1  # the legend's own
    assert not [attrs for _, attrs in page.tags if {"src", "href", "style", "onerror", "onclick"} & set(attrs)]
    policies = [attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"]
    style = text.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


@pytest.mark.parametrize(
    ("token", "shown"),
    [(" the", "·the"), ("\n", "↵"), ("\x00\u202e", "\\x00\\u202e"), ("\u0301", "◌\u0301"), ("a b", "a b"), ("é", "é")],
)
def test_tokens_are_made_visible(token: str, shown: str) -> None:
    capture = replace(capture_with_norms(USUAL), decode=lambda ids: [token for _ in ids])
    assert Page(heatmap_html(capture)).tables[0][0][1][2] == f"{shown}0"


def test_without_a_tokenizer_ids_stand_for_tokens() -> None:
    capture = replace(capture_with_norms(USUAL), decode=None)
    assert Page(heatmap_html(capture)).tables[2][0][1][2] == "210"


@pytest.mark.parametrize(
    ("ratio", "limit", "expected"),
    [(1.0, 2, "m"), (1.03, 2, "m"), (1.1, 2, "h1"), (2**0.51, 2, "h5"), (2, 2, "h9"), (7.9, 2, "h9"), (8, 2, "x"),
     (0.5, 2, "l9"), (0.0, 2, "l9"), (0.9, 1.25, "l4"), (1.25, 1.25, "h9")],
)  # fmt: skip
def test_colours_are_logarithmic_and_end_at_the_limit(ratio: float, limit: float, expected: str) -> None:
    assert colour_class(ratio, limit) == expected


def test_massive_rows_do_not_stretch_the_scale() -> None:
    calm = picture_of(capture_with_norms(USUAL), None, most_tokens=100, most_cells=1000)
    assert calm.limit == 2.0
    wild = {layer: [5000 * norms[0], *norms[1:]] for layer, norms in USUAL.items()}
    assert picture_of(capture_with_norms(wild), None, most_tokens=100, most_cells=1000).limit == 2.0
    even = picture_of(capture_with_norms({0: [3.0] * 8}), None, most_tokens=100, most_cells=1000)
    assert even.limit == 1.25


def test_what_is_no_number_is_shown_as_none() -> None:
    capture = capture_with_norms({0: [float("nan"), 1, 1, 1, 1, 1, 1, float("inf")], 2: [0.0] * 8})
    tables = Page(heatmap_html(capture)).tables
    assert (tables[0][1][1][1]["class"], tables[0][1][1][2]) == ("n", "–")
    assert tables[2][1][2][1] == {"class": "n", "data-norm": "inf"}
    assert tables[0][1][2][2] == "1.00"
    assert {attrs["class"] for _, attrs, _ in tables[0][2][1:-1]} == {"n"}


def test_long_captures_are_cut_and_it_is_said() -> None:
    count = 400
    position = np.arange(count)
    labels = Labels(position // 200, np.full(count, -1), position % 200, position, np.zeros(count, dtype=np.bool_))
    capture = replace(
        made(layers=(0,)), labels=labels, tensors={("resid_post", 0): torch.ones(count, 4)}, decode=decode
    )
    text = heatmap_html(capture)
    assert "the first 160 of 200 rows" in text
    picture = picture_of(capture, None, most_tokens=50, most_cells=60)
    assert [(sample.index, len(sample.tokens)) for sample in picture.samples] == [(0, 50)]
    assert picture.left_out == 1


def test_prompts_that_failed_or_have_no_row_are_left_out() -> None:
    capture = replace(capture_with_norms(USUAL), errors={0: MidstreamError("no")})
    assert "Prompt 0" not in heatmap_html(capture)
    assert "Prompt 1" in heatmap_html(capture)


def test_which_site() -> None:
    capture = made(("resid_post", "attn_out"))
    with pytest.raises(SpecError, match=r"which site.* resid_post, attn_out"):
        heatmap_html(capture)
    with pytest.raises(SpecError, match="no site 'q'"):
        heatmap_html(capture, "q")
    assert "Row norms at attn_out" in heatmap_html(capture, "attn_out")


def test_no_rows_is_refused() -> None:
    capture = made()
    nothing = capture.labels.take(np.array([], dtype=np.int64))
    with pytest.raises(SpecError, match="no rows to draw"):
        heatmap_html(replace(capture, labels=nothing, tensors={}))
    with pytest.raises(SpecError, match="without token ids"):
        heatmap_html(replace(capture, labels=nothing))


def test_png(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    path = heatmap_png(capture_with_norms(USUAL), tmp_path / "page.png")
    with image.open(path) as picture:
        assert picture.format == "PNG"
        pixels = np.asarray(picture.convert("RGB")).reshape(-1, 3)
    for colour in ((0x4A, 0x1A, 0x6B), (0xD9, 0x59, 0x0B), (0x21, 0x66, 0xAC)):
        assert (pixels == colour).all(axis=1).any(), colour
    assert [one.name for one in tmp_path.iterdir()] == ["page.png"]
    with pytest.raises(FileNotFoundError, match="no directory"):
        heatmap_png(capture_with_norms(USUAL), tmp_path / "no" / "page.png")


def test_png_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from midstream.web import plot

    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(MidstreamError, match=r"pip install 'midstream\[demo\]'"):
        heatmap_png(capture_with_norms(USUAL), tmp_path / "page.png")
