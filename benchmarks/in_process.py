"""What is measured in this process, all on one loaded model: the bare forward, the usual loop, and midstream."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peers.protocol import padded_batches
from reference import PromptRows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import midstream as ms
from midstream.backends.huggingface.batching import plan


class InProcess:
    """The plain model of transformers, the prompts, and the batches that midstream would run them in."""

    def __init__(self, model_folder: Path, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).eval()
        self.language_model = ms.load(self.model)
        self.depth: int = self.model.config.num_hidden_layers

    def bare(self, blocks: int) -> int:
        """Run the first blocks over midstream's own batches, and nothing else. Returns the rows computed."""
        with _only_blocks(self.model, blocks), torch.inference_mode():
            for ids in self._batches():
                self.model.model(input_ids=ids, use_cache=False)
        return sum(map(len, self.prompts))

    def _batches(self) -> Iterator[Tensor]:
        """Yield midstream's batches as it would: padded on the right, without a mask."""
        for group in plan(dict(enumerate(map(tuple, self.prompts)))):
            assert group.prefix == 0, "these prompts share no beginning"
            for batch in group.batches:
                ids = torch.zeros((len(batch.prompts), batch.width), dtype=torch.long)
                for row, index in enumerate(batch.prompts):
                    ids[row, : len(self.prompts[index])] = torch.tensor(self.prompts[index])
                yield ids

    def usual(self, layer: int) -> list[Tensor]:
        """Capture one block as is usual: all hidden states, batches of 16 in order, padded to the longest."""
        rows: list[Tensor] = []
        with torch.inference_mode():
            for batch in padded_batches(self.prompts, pad_id=0):
                output = self.model(
                    input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True
                )
                rows.append(output.hidden_states[layer + 1][batch.kept])
        return rows

    def usual_rows(self, layer: int, wanted: list[int]) -> PromptRows:
        """Return the rows of some prompts, as the usual loop gives them."""
        of_prompt = torch.cat(self.usual(layer)).split([len(prompt) for prompt in self.prompts])
        return {(index, layer): of_prompt[index].clone() for index in wanted}

    def midstream(self, layers: list[int] | None) -> int:
        """Capture all rows with midstream. Returns how many there are."""
        captured = self.language_model.capture(self.prompts, layers=layers)
        return len(captured.rows(captured.layer_ids[0]))

    def midstream_rows(self, layers: list[int] | None, wanted: list[int]) -> PromptRows:
        """Return the rows of some prompts, as midstream gives them when it captures from all."""
        captured = self.language_model.capture(self.prompts, layers=layers)
        return {(index, layer): rows.clone() for index in wanted for layer, rows in captured.sample(index).items()}


@contextmanager
def _only_blocks(model: Any, count: int) -> Iterator[None]:
    """Take the blocks past `count`, and the norm after them, out of the model for a while."""
    body = model.model
    layers, norm = body.layers, body.norm
    body.layers, body.norm = layers[:count], nn.Identity()
    try:
        yield
    finally:
        body.layers, body.norm = layers, norm
