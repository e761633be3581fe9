"""Harvests from vLLM, in this process and behind a server: the rows of the model, whatever stopped the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import midstream as ms
from midstream import harvest
from midstream.harvest import HarvestSpec
from on_vllm.kit import WHERE, Engines, relative

TEXTS = [f"sample {number} " + "x" * (number % 11) for number in range(9)]
SPEC = HarvestSpec(capture=ms.CaptureSpec(layers=[0, 2]), shard_tokens=40)


@WHERE
def test_rows_are_those_of_the_model(
    bytes_llama: tuple[Path, ms.LanguageModel], engines: Engines, where: str, tmp_path: Path
) -> None:
    lm = engines.at(where, bytes_llama[0])

    def dies(progress: Any) -> None:
        if progress.tokens > 60:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        harvest.run(lm, TEXTS, tmp_path / "out", SPEC, told=dies)
    report = harvest.run(lm, TEXTS, tmp_path / "out", SPEC)
    assert 0 < report.made < report.shards
    found = harvest.open(tmp_path / "out")
    assert found.complete
    assert found.manifest.identity["execution"]["backend"] == where
    want = bytes_llama[1].capture(TEXTS, layers=[0, 2])
    for layer in (0, 2):
        assert relative(found.rows(layer)[:], want.rows(layer)) < 1e-4
    assert np.array_equal(found.row_labels("position"), want.labels.position)
    assert np.array_equal(found.row_labels("token_id"), want.labels.token_id)
    with pytest.raises(ms.UnsupportedOperationError, match="has no in_process_torch"):
        harvest.run(lm, TEXTS, tmp_path / "other", SPEC, compiled=True)


def test_vllms_reader_takes_what_a_harvest_writes(bytes_llama: tuple[Path, ms.LanguageModel], tmp_path: Path) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import load_hidden_states

    harvest.run(bytes_llama[1], TEXTS, tmp_path / "out", SPEC)
    found = harvest.open(tmp_path / "out")
    files = found.to_hidden_states(tmp_path / "files")
    assert len(files) == len(TEXTS)
    for index, path in enumerate(files):
        read = load_hidden_states(str(path))
        assert relative(read["hidden_states"][:, 1], found.sample(index)["resid_post.2"]) == 0
        assert read["token_ids"].tolist() == list(bytes_llama[1].prepare([TEXTS[index]])[0].token_ids)
    back = harvest.from_hidden_states(tmp_path / "files", tmp_path / "back")
    assert relative(back.rows(2)[:], found.rows(2)[:]) == 0
