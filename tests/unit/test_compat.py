"""Other tools' entry points, over an `lm` that records what it is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from midstream.compat import CapturedSite, capture_activations
from midstream.core.capture import CaptureSpec
from midstream.core.errors import PromptError, SpecError
from midstream.core.result import CaptureResult
from unit.captures import made


class FakeLanguageModel:
    """Answers each capture with made-up rows of the sites that it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, dict[str, Any]]] = []

    def capture(self, prompts: Any, **how: Any) -> CaptureResult:
        self.asked.append((prompts, how))
        return made(how["sites"], how["layers"] or (0, 1, 2))


@pytest.fixture
def lm() -> FakeLanguageModel:
    return FakeLanguageModel()


def places(rows: list[CapturedSite]) -> list[tuple[int, str]]:
    return [(layer, site) for layer, site, _ in rows]


def test_residuals_by_layer_then_sublayers(lm: FakeLanguageModel) -> None:
    rows = capture_activations(lm, [1, 2], {"sites": ["mlp", "residual", "attn"], "layers": [0, 2]})
    assert places(rows) == [(0, "residual"), (2, "residual"), (0, "attn"), (0, "mlp"), (2, "attn"), (2, "mlp")]
    assert set(lm.asked[0][1]["sites"]) == {"mlp_out", "resid_post", "attn_out"}
    layer, site, tensor = rows[1]
    assert (layer, site, tensor.shape) == (2, "residual", (8, 4))


def test_our_own_names_and_spec(lm: FakeLanguageModel) -> None:
    spec = CaptureSpec(sites=("q", "resid_pre", "resid_post"), layers=(1,), select="prompt[-1]", dtype="float16")  # pyright: ignore
    rows = capture_activations(lm, [1, 2], spec)
    assert places(rows) == [(1, "resid_pre"), (1, "resid_post"), (1, "q")]
    assert lm.asked == [([[1, 2]], {"layers": (1,), "sites": spec.sites, "rows": spec.select, "dtype": "float16"})]


def test_interlens_spec_object_and_defaults(lm: FakeLanguageModel) -> None:
    theirs = SimpleNamespace(sites=("residual",), layers=None, offload="cpu")
    assert places(capture_activations(lm, [1], theirs)) == [(0, "residual"), (1, "residual"), (2, "residual")]
    assert places(capture_activations(lm, [1], {"layers": [2], "offload": None})) == [(2, "residual")]


@pytest.mark.parametrize("ids", [[3, 4], [[3, 4]], torch.tensor([3, 4]), torch.tensor([[3, 4]]), ((3, 4),)])
def test_forms_of_one_sequence(lm: FakeLanguageModel, ids: Any) -> None:
    capture_activations(lm, ids, {"layers": [0]})
    assert [list(prompt) for prompt in lm.asked[0][0]] == [[3, 4]]


def test_refused(lm: FakeLanguageModel) -> None:
    with pytest.raises(PromptError, match="2 sequences"):
        capture_activations(lm, torch.ones(2, 3, dtype=torch.int64), {"layers": [0]})
    with pytest.raises(SpecError, match=r"E_SITE at capture\.sites\.?\[1\]: no site 'logits'"):
        capture_activations(lm, [1], {"sites": ["residual", "logits"]})
    with pytest.raises(SpecError, match=r"E_UNKNOWN_FIELD at capture\.positions"):
        capture_activations(lm, [1], {"positions": [0]})
    assert lm.asked == []
