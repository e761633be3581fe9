"""CaptureResult's whole face, on data made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from midstream.core.capture import CaptureReceipt, CaptureSpec, Labels
from midstream.core.errors import CaptureError, MidstreamError, SpecError, UnsupportedOperationError
from midstream.core.generation import Completion
from midstream.core.result import CaptureResult
from midstream.core.sites import SiteLayout

# sample, choice, position, token_id, generated; sample 1 has no row
ROWS = [
    (0, -1, 0, 10, False),
    (0, -1, 3, 13, False),
    (0, 0, 4, 14, True),
    (2, -1, 1, 21, False),
    (3, -1, 0, 30, False),
    (3, -1, 1, 31, False),
]
COUNTS = [3, 0, 1, 2]
WIDTHS = {"resid_post": 4, "head_out": 6}
TEXTS = {10: "<s>", 13: " the", 14: " <b>&", 21: " cat", 30: "a", 31: "b"}


def labels_of(rows: Sequence[tuple[int, int, int, int, bool]]) -> Labels:
    table = np.array(rows, dtype=np.int64).reshape(-1, 5)
    return Labels(*table[:, :4].T.copy(), table[:, 4].astype(np.bool_))


def value(site: str, layer: int, rows: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Row r of layer l at a site holds 100·l + 10·r + column, negative at head_out."""
    sign = -1 if site == "head_out" else 1
    table = [[sign * (100 * layer + 10 * row + column) for column in range(WIDTHS[site])] for row in rows]
    return torch.tensor(table, dtype=dtype).reshape(len(rows), WIDTHS[site])


def capture(
    sites: Sequence[str] = ("resid_post",),
    rows: Sequence[tuple[int, int, int, int, bool]] = ROWS,
    samples: int = 4,
    dtype: torch.dtype = torch.float32,
    errors: dict[int, MidstreamError] | None = None,
    layers: Sequence[int] = (7, 2),  # not ascending: results are keyed by id, never by place
    decode: Any = lambda ids: [TEXTS[token] for token in ids],
) -> CaptureResult:
    tensors = {(site, layer): value(site, layer, range(len(rows)), dtype) for site in sites for layer in layers}
    return CaptureResult(
        labels=labels_of(rows),
        tensors=tensors if rows else {},  # pyright: ignore[reportArgumentType]
        layouts={site: {layer: SiteLayout(WIDTHS[site]) for layer in layers} for site in sites},  # pyright: ignore
        outputs=[Completion(prompt_token_ids=(1, 2)) for _ in range(samples)],
        receipt=CaptureReceipt(selected=len(rows), computed=len(rows)),
        spec=CaptureSpec(sites=sites, layers=layers),
        errors=errors or {},
        decode=decode,
    )


BOTH = capture(("resid_post", "head_out"))


def test_what_is_there() -> None:
    result = capture()
    assert result.layer_ids == (2, 7)
    assert result.sites == ("resid_post",)
    assert BOTH.sites == ("resid_post", "head_out")
    assert result.labelled
    assert len(result) == len(result.outputs) == 4
    assert result.layouts["resid_post"][7] == SiteLayout(4)
    assert result.receipt.complete


def test_rows() -> None:
    result = capture()
    for layer in (2, 7):
        assert result.rows(layer).equal(value("resid_post", layer, range(6)))
        assert len(result.rows(layer)) == len(result.labels)
    assert BOTH.rows(2, site="head_out").equal(value("head_out", 2, range(6)))
    assert BOTH.rows(2, "resid_post").equal(value("resid_post", 2, range(6)))


def test_a_layer_that_was_not_captured() -> None:
    for call in (capture().rows, capture().padded, capture().last, capture().meta):
        with pytest.raises(SpecError, match=r"^E_LAYER_RANGE at layer: .*3.*2.*7|^E_LAYER_RANGE.*3.*7.*2"):
            call(3)


def test_with_several_sites_the_site_is_needed() -> None:
    calls: list[Any] = [BOTH.rows, BOTH.padded, BOTH.last, BOTH.sample, lambda _: BOTH.to_nested()]
    for call in calls:
        with pytest.raises(UnsupportedOperationError, match=r"^E_SITE at site: .*resid_post, head_out"):
            call(2)
    for site in ("q", "residual"):
        with pytest.raises(UnsupportedOperationError, match=rf"^E_SITE at site: .*{site}.*resid_post, head_out"):
            BOTH.rows(2, site)


def test_sites_of_different_layers() -> None:
    """As router_logits has MoE layers alone."""
    some = replace(BOTH, tensors={key: rows for key, rows in BOTH.tensors.items() if key != ("head_out", 2)})
    assert some.layer_ids == (2, 7)
    assert set(some.sample(0, "resid_post")) == {2, 7}
    assert set(some.sample(0, "head_out")) == {7}
    with pytest.raises(SpecError, match=r"^E_LAYER_RANGE at layer: .*2.*\[7\]"):
        some.rows(2, "head_out")


def test_sample() -> None:
    result = capture()
    assert set(result.sample(0)) == {2, 7}
    for index, places in enumerate([[0, 1, 2], [], [3], [4, 5]]):
        for layer, rows in result.sample(index).items():
            assert rows.shape == (COUNTS[index], 4)
            assert rows.equal(value("resid_post", layer, places))
        assert BOTH.sample(index, site="head_out")[7].equal(value("head_out", 7, places))
        assert result.sample_positions(index).tolist() == [ROWS[place][2] for place in places]
        assert result.sample_token_ids(index).tolist() == [ROWS[place][3] for place in places]


def test_a_sample_without_a_row() -> None:
    assert {layer: tuple(rows.shape) for layer, rows in capture().sample(1).items()} == {2: (0, 4), 7: (0, 4)}
    assert capture().sample_positions(1).shape == capture().sample_token_ids(1).shape == (0,)
    assert capture().tokens(1) == []


@pytest.mark.parametrize("index", [4, -1, 99])
def test_a_sample_that_is_not_there(index: int) -> None:
    result = capture()
    for call in (result.sample, result.sample_positions, result.sample_token_ids, result.tokens):
        with pytest.raises(IndexError, match=f"{index}.*4"):
            call(index)


def test_tokens() -> None:
    rows = [(row.position, row.token_id, row.text, row.choice) for row in capture().tokens(0)]
    assert rows == [(0, 10, "<s>", -1), (3, 13, " the", -1), (4, 14, " <b>&", 0)]
    assert [row.text for row in capture(decode=None).tokens(3)] == [None, None]


def test_meta() -> None:
    meta = capture().meta(7)
    assert {name: column.tolist() for name, column in meta.items()} == {
        "req_ids": [0, 0, 0, 2, 3, 3],
        "positions": [0, 3, 4, 1, 0, 1],
        "token_ids": [10, 13, 14, 21, 30, 31],
    }


# --- other shapes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_padded(dtype: torch.dtype) -> None:
    out, mask = capture(dtype=dtype).padded(7)
    assert out.shape == (4, 3, 4)
    assert out.dtype == dtype
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[place < count for place in range(3)] for count in COUNTS]
    assert out[mask].equal(value("resid_post", 7, range(6), dtype))
    assert out[0].equal(value("resid_post", 7, [0, 1, 2], dtype))
    assert not out[~mask].any()
    assert BOTH.padded(2, "head_out")[0].shape == (4, 3, 6)


def test_last() -> None:
    full = capture(rows=[row for row in ROWS if row[0] != 1] + [(4, -1, 0, 1, False)], samples=5)
    with pytest.raises(CaptureError, match="sample 1"):
        full.last(2)
    rows = [(0, -1, 0, 1, False), (0, 0, 1, 2, True), (1, -1, 5, 3, False)]
    assert capture(rows=rows, samples=2).last(2).equal(value("resid_post", 2, [1, 2]))


def test_to_nested_has_layers_ascending() -> None:
    nested = capture().to_nested()
    assert [[len(rows) for rows in sample] for sample in nested] == [[count, count] for count in COUNTS]
    assert nested[3][0].equal(value("resid_post", 2, [4, 5]))
    assert nested[3][1].equal(value("resid_post", 7, [4, 5]))
    assert BOTH.to_nested("head_out")[2][1].equal(value("head_out", 7, [3]))


def test_sample_has_layers_ascending() -> None:
    assert list(capture().sample(0)) == [2, 7]


def test_numpy() -> None:
    arrays = BOTH.numpy()
    assert set(arrays) == {f"{site}.{layer}" for site in BOTH.sites for layer in (2, 7)}
    assert arrays["head_out.2"].dtype == np.float32
    assert arrays["head_out.2"].tolist() == value("head_out", 2, range(6)).tolist()


def test_numpy_of_bfloat16_is_exact() -> None:
    result = capture(dtype=torch.bfloat16)
    array = result.numpy()["resid_post.7"]
    assert array.dtype == np.float32
    assert torch.from_numpy(array).to(torch.bfloat16).equal(result.rows(7))
    assert capture(dtype=torch.float16).numpy()["resid_post.7"].dtype == np.float16
    assert capture(dtype=torch.int64).numpy()["resid_post.7"].dtype == np.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_to_frame(dtype: torch.dtype) -> None:
    frame = capture(("resid_post", "head_out"), dtype=dtype).to_frame()
    assert len(frame) == 6
    assert frame["sample"].tolist() == [0, 0, 0, 2, 3, 3]
    assert frame["choice"].tolist() == [-1, -1, 0, -1, -1, -1]
    assert frame["position"].tolist() == [0, 3, 4, 1, 0, 1]
    assert frame["token_id"].tolist() == [10, 13, 14, 21, 30, 31]
    assert frame["phase"].tolist() == ["prompt", "prompt", "generation", "prompt", "prompt", "prompt"]
    assert frame["token"].tolist() == [TEXTS[token] for token in frame["token_id"]]
    assert frame["head_out.7"][3].tolist() == value("head_out", 7, [3], dtype)[0].tolist()
    assert {"resid_post.2", "resid_post.7", "head_out.2"} <= set(frame.columns)
    assert "token" not in capture(decode=None).to_frame().columns


# --- nothing selected, and requests that failed


def test_a_capture_without_any_row_has_no_layers() -> None:
    empty = capture(rows=[])
    assert empty.layer_ids == ()
    assert empty.labelled
    assert len(empty) == 4
    assert len(empty.labels) == 0
    assert empty.sample(0) == {}
    assert empty.to_nested() == [[], [], [], []]
    assert empty.numpy() == {}
    assert len(empty.to_frame()) == 0
    assert "0 rows" in repr(empty)
    assert "0" in empty._repr_html_()
    with pytest.raises(SpecError, match=r"^E_LAYER_RANGE"):
        empty.rows(2)


def test_a_request_that_failed_carries_its_error_and_the_others_stay_readable() -> None:
    error = CaptureError("sample 1 has values that are not finite")
    result = capture(errors={1: error})
    for call in (result.sample, result.sample_positions, result.sample_token_ids, result.tokens):
        with pytest.raises(CaptureError, match="sample 1") as caught:
            call(1)
        assert caught.value is error
    assert result.sample(0)[7].equal(value("resid_post", 7, [0, 1, 2]))
    assert result.rows(7).equal(value("resid_post", 7, range(6)))
    with pytest.raises(CaptureError, match="sample 1 has values"):
        result.last(7)
    assert "1" in repr(result).splitlines()[-1]
    assert "failed" in repr(result)
    assert "<tr><td>0</td>" in result._repr_html_()
    assert "<tr><td>1</td>" not in result._repr_html_()


# --- to look at


def test_repr() -> None:
    text = repr(capture(("resid_post", "head_out"), dtype=torch.bfloat16, layers=(2, 3, 4, 7)))
    assert "4 prompts" in text
    assert "6 rows" in text
    assert "resid_post: layers 2-4, 7, width 4, bfloat16" in text
    assert "head_out: layers 2-4, 7, width 6, bfloat16" in text
    assert "layers 2, 7" in repr(capture())  # in order, whatever order they came in


def test_html_escapes() -> None:
    html = capture()._repr_html_()
    assert "&lt;s&gt; the &lt;b&gt;&amp;" in html
    assert "<s>" not in html
    assert "<b>&" not in html


def test_html_names_each_readable_sample_with_its_number_of_rows() -> None:
    html = capture()._repr_html_()
    for index, count in enumerate(COUNTS):
        assert f"<tr><td>{index}</td><td>{count}</td>" in html
    assert "21" in capture(decode=None)._repr_html_()  # without a tokenizer: ids
    many = capture(rows=[(sample, -1, 0, 10, False) for sample in range(50)], samples=50)
    assert many._repr_html_().count("<tr>") < 20


def test_html_has_the_norm_of_each_layers_last_row() -> None:
    """As its docstring says."""
    rows = [(0, -1, 0, 10, False), (0, -1, 1, 13, False)]
    norm = float(value("resid_post", 7, [1]).norm())
    assert f"{norm:.0f}" in capture(rows=rows, samples=1)._repr_html_()


def test_samples_do_not_leak_into_each_other_when_ids_have_gaps() -> None:
    rows = [(1, -1, 0, 10, False), (5, -1, 0, 13, False)]
    result = capture(rows=rows, samples=6)
    assert [len(result.sample(index)[2]) for index in range(6)] == [0, 1, 0, 0, 0, 1]
    assert result.padded(2)[1].tolist() == [[False], [True], [False], [False], [False], [True]]
