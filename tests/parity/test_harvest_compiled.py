"""Harvests on compiled blocks: the same rows up to rounding, and the same bytes whatever shapes came first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream as ms
from midstream import harvest
from midstream.harvest import HarvestSpec, OtherHarvestError, identity
from unit.harvests import contents
from unit.tiny_checkpoint import save_tiny

TEXTS = ["one", "twenty-two words", "x" * 200, "some more of it", "x" * 40, "and", "the last of them", "y" * 90, "a"]
SPEC = HarvestSpec(capture=ms.CaptureSpec(sites=("resid_pre", "resid_post"), layers=[1, 2]), shard_tokens=60)


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ms.LanguageModel]:
    with ms.load(save_tiny(tmp_path_factory.mktemp("tiny"))) as lm:
        yield lm


def model_of(lm: ms.LanguageModel) -> Any:
    session: Any = lm.session
    return session.model


@pytest.mark.slow
def test_the_same_bytes_whatever_came_first(lm: ms.LanguageModel, tmp_path: Path) -> None:
    torch._dynamo.reset()
    own = model_of(lm).model.layers[1]
    own.forward = given = own.forward  # as accelerate has it
    harvest.run(lm, TEXTS, tmp_path / "whole", SPEC, compiled=True)
    assert vars(own).pop("forward") is given
    whole, plain = harvest.open(tmp_path / "whole"), tmp_path / "plain"
    assert len(whole.manifest.shards) > 3
    harvest.run(lm, TEXTS, plain, SPEC, compiled=False)
    for name in whole.columns:
        site, _, layer = name.partition(".")
        rows = harvest.open(plain).rows(int(layer), site)[:]
        torch.testing.assert_close(whole.rows(int(layer), site)[:], rows, rtol=1e-4, atol=1e-4)
    with pytest.raises(OtherHarvestError, match=r"execution\.compiled was true, and is not set"):
        harvest.run(lm, TEXTS, tmp_path / "whole", SPEC, compiled=False)

    for after in (1, 2, 3):  # in a new process other shapes come first

        def dies(progress: Any, after: int = after) -> None:
            if progress.tokens > sum(one.counts.tokens for one in whole.manifest.shards[:after]):
                raise KeyboardInterrupt

        out = tmp_path / f"dies-{after}"
        with pytest.raises(KeyboardInterrupt):
            harvest.run(lm, TEXTS, out, SPEC, compiled=True, told=dies)
        torch._dynamo.reset()
        report = harvest.run(lm, TEXTS, out, SPEC, compiled=True)
        assert 0 < report.made < report.shards
        assert contents(out) == contents(tmp_path / "whole")
    assert not any("forward" in vars(block) for block in model_of(lm).modules())


def test_what_cannot_be_compiled(lm: ms.LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = HarvestSpec(capture=ms.CaptureSpec(sites=("mlp_out",), layers=[1]))
    with pytest.raises(ms.UnsupportedOperationError, match="mlp_out is read inside of a block"):
        harvest.run(lm, TEXTS, tmp_path / "out", inside, compiled=True)
    monkeypatch.setattr(identity, "COMPILE_TOKENS", 1)
    harvest.run(lm, TEXTS, tmp_path / "out", inside)
    assert "compiled" not in harvest.open(tmp_path / "out").manifest.identity["execution"]
    block = model_of(lm).model.layers[0]
    handle = block.register_forward_hook(lambda *_: None)
    try:
        with pytest.raises(ms.UnsupportedOperationError, match="the model has hooks of yours"):
            harvest.run(lm, TEXTS, tmp_path / "other", SPEC, compiled=True)
    finally:
        handle.remove()


def test_large_inputs_are_compiled(lm: ms.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    large = harvest.inputs.Scanned("sha256:0", 10, identity.COMPILE_TOKENS)
    small = harvest.inputs.Scanned("sha256:0", 10, identity.COMPILE_TOKENS - 1)
    assert identity.compiles(lm, SPEC, large, None)
    assert not identity.compiles(lm, SPEC, small, None)
    assert identity.compiles(lm, SPEC, small, True)
    assert not identity.compiles(lm, SPEC, large, False)
