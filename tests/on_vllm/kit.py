"""Tiny models on an engine: what is true of them, and one engine at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import midstream as ms
from on_vllm.engine_options import ENGINE
from on_vllm.serving import Servers
from parity.oracle import expected

__all__ = ["ENGINE", "WHERE", "Checkpoint", "Engines", "assert_rows", "relative"]

#: For tests that hold on an engine in this process and behind a server alike.
WHERE = pytest.mark.parametrize("where", ["vllm", "vllm-serve"])


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """One tiny model on disk, the same in transformers, and the true rows of any ids."""

    name: str
    folder: Path
    model: PreTrainedModel
    hf: ms.LanguageModel
    _known: dict[tuple[int, ...], dict[tuple[str, int], Tensor]] = field(default_factory=dict)

    def oracle(self, ids: Any) -> dict[tuple[str, int], Tensor]:
        """`(site, layer)` → `[tokens, width]` from the hand-written arithmetic."""
        key = tuple(ids)
        if key not in self._known:
            self._known[key] = expected(self.name, self.model, list(key))
        return self._known[key]


def relative(got: Tensor, want: Tensor) -> float:
    """The largest relative error of a row."""
    assert got.shape == want.shape, f"{tuple(got.shape)} where {tuple(want.shape)} was due"
    if not len(got):
        return 0.0
    error = (got.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1).clamp(min=1e-12)
    worst = float(error.max())
    return float("inf") if worst != worst else worst


class Engines:
    """The engine that is up in this process, and what it was asked for with; and servers."""

    def __init__(self) -> None:
        self.servers = Servers()
        self._key: Any = None
        self._lm: ms.LanguageModel | None = None

    def at(self, where: str, folder: Path | str) -> ms.LanguageModel:
        """The same model on an engine in this process or behind a server."""
        return self.get(folder) if where == "vllm" else self.servers.lm(folder)

    def get(self, folder: Path | str, **options: Any) -> ms.LanguageModel:
        engine = ENGINE | options.pop("engine_kwargs", {})
        key = (str(folder), repr(sorted(options.items())), repr(sorted(engine.items())))
        if key != self._key:
            self.close()
            given = {"dtype": "float32"} | options
            self._lm = ms.load(str(folder), backend="vllm", engine_kwargs=engine, **given)
            self._key = key
        assert self._lm is not None
        return self._lm

    def close(self) -> None:
        if self._lm is not None:
            self._lm.close()
        self._lm = self._key = None


def assert_rows(cap: ms.CaptureResult, source: Checkpoint, tolerance: float = 1e-4) -> None:
    """Each captured row is the oracle's, and carries the label of the token that it consumed."""
    labels, errors = cap.labels, {}
    for sample, output in enumerate(cap.outputs):
        prompt = output.prompt_token_ids
        for choice, one in enumerate(output.choices or (output,)):
            ids = [*prompt, *one.token_ids[:-1]]
            mine = (labels.sample == sample) & ((labels.choice == choice) | ((labels.choice == -1) & (choice == 0)))
            where = labels.position[mine]
            assert labels.token_id[mine].tolist() == [ids[position] for position in where]
            assert labels.generated[mine].tolist() == [position >= len(prompt) for position in where]
            want = source.oracle(ids)
            for (site, layer), rows in cap.tensors.items():
                got, true = rows[torch.from_numpy(mine)], want[site, layer][torch.from_numpy(where)]
                errors[f"{site}.{layer} of sample {sample}, choice {choice}"] = relative(got, true)
    wrong = {what: f"{error:.2g}" for what, error in errors.items() if error > tolerance}
    assert not wrong, wrong
