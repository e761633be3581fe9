"""A harvest as a data set of `datasets`, as vLLM's hidden-states files, and made of those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import midstream as ms
from midstream import harvest
from midstream.formats import hidden_states_file
from midstream.harvest import Harvest, HarvestSpec
from unit.harvests import contents
from unit.tiny_checkpoint import save_tiny

TEXTS = [f"sample {number} " + "x" * (number % 11) for number in range(9)]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with ms.load(save_tiny(tmp_path_factory.mktemp("tiny"))) as lm:
        yield lm


@pytest.fixture(scope="module")
def found(lm: ms.LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Harvest:
    out = tmp_path_factory.mktemp("harvests") / "out"
    records = [{"text": text, "id": f"r{place}", "place": place} for place, text in enumerate(TEXTS)]
    harvest.run(lm, records, out, HarvestSpec(capture=ms.CaptureSpec(layers=[1, 2]), shard_tokens=40))
    return harvest.open(out)


def test_a_data_set(found: Harvest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    data = found.to_dataset(2)
    assert len(data) == len(TEXTS)
    for index, one in enumerate(data.with_format("torch")):
        assert one["id"] == f"r{index}"
        assert json.loads(one["labels"]) == {"place": index}
        assert torch.equal(one["rows"], found.sample(index)["resid_post.2"])
        assert one["positions"].tolist() == list(range(len(TEXTS[index]) + 1))
    # and a saved data set is an input
    texts = datasets.Dataset.from_list([{"text": text, "place": place} for place, text in enumerate(TEXTS)])
    texts.save_to_disk(str(tmp_path / "texts"))
    with harvest.inputs.opened(tmp_path / "texts") as given:
        assert [one.labels for one in given.records()] == [{"place": place} for place in range(len(TEXTS))]
    with harvest.inputs.opened(texts) as given:
        assert [one.prompt for one in given.records()] == [{"prompt": text} for text in TEXTS]


def test_hidden_states_files_and_back(lm: ms.LanguageModel, found: Harvest, tmp_path: Path) -> None:
    files = found.to_hidden_states(tmp_path / "files")
    assert len(files) == len(TEXTS)
    for index, path in enumerate(files):
        one = hidden_states_file.read(path)
        assert torch.equal(one.hidden_states[:, 1], found.sample(index)["resid_post.2"])
        assert one.layer_ids == (2, 3)
    back = harvest.from_hidden_states(tmp_path / "files", tmp_path / "back", shard_bytes=9000)
    assert len(back.manifest.shards) > 2
    assert back.complete
    assert torch.equal(back.rows(2)[:], found.rows(2)[:])
    assert [back.labels(index) for index in range(2)] == [{"id": "sample-000000"}, {"id": "sample-000001"}]
    before = contents(tmp_path / "back")
    (tmp_path / "back" / "shards" / "000001.safetensors").unlink()
    harvest.from_hidden_states(tmp_path / "files", tmp_path / "back", shard_bytes=9000)
    assert contents(tmp_path / "back") == before


def test_what_cannot_be_converted(lm: ms.LanguageModel, found: Harvest, tmp_path: Path) -> None:
    spec = HarvestSpec(capture=ms.CaptureSpec(layers=[1], select="prompt[-1]"))
    harvest.run(lm, TEXTS, tmp_path / "some", spec)
    with pytest.raises(ms.SpecError, match="holds every row, and this harvest some of them"):
        harvest.open(tmp_path / "some").to_hidden_states(tmp_path / "files")
    assert not (tmp_path / "files").exists()
    with pytest.raises(ms.PromptError, match="holds no hidden-states files"):
        harvest.from_hidden_states(tmp_path, tmp_path / "back")
    found.to_hidden_states(tmp_path / "files")
    lm.capture([TEXTS[0]], layers=[3]).save_hidden_states(tmp_path / "other")
    (tmp_path / "other" / "sample-000000.safetensors").rename(tmp_path / "files" / "zz.safetensors")
    with pytest.raises(
        ms.PromptError, match=r"zz\.safetensors holds resid_post\.3; .* holds resid_post\.1, resid_post\.2"
    ):
        harvest.from_hidden_states(tmp_path / "files", tmp_path / "back")
