"""What every peer's process speaks: one JSON object per line, a request on stdin, its answer on stdout.

The process says `ready` once its model is loaded, and lives until stdin ends, so that the parent can take
turns among peers. It runs in the peer's own environment: nothing here but the standard library, torch and
safetensors.

    {"do": "run", "mode": "padded", "layers": [15], "count": 256}  ->  {"wall": 1.9, "cpu": 3.7, "rows": 66000}
    {"do": "rows", …, "prompts": [3, 7], "file": "rows.safetensors"}  ->  tensors "<prompt>.<layer>" in the file
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

import torch
from safetensors.torch import save_file

BATCH = 16

# For each layer, tensors of rows that joined give the rows of all prompts, in order.
Rows = dict[int, list[torch.Tensor]]
Capture = Callable[[list[list[int]], list[int]], Rows]


@dataclass
class Batch:
    """Prompts padded on the right to the longest of them."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor

    @property
    def kept(self) -> torch.Tensor:
        """True where there is a token, for taking the rows out of `[prompts, longest, hidden]`."""
        return self.attention_mask.bool()


def padded_batches(prompts: list[list[int]], pad_id: int, size: int = BATCH) -> Iterator[Batch]:
    """Yield the prompts in their order, `size` at a time."""
    for start in range(0, len(prompts), size):
        group = prompts[start : start + size]
        longest = max(map(len, group))
        ids = torch.full((len(group), longest), pad_id)
        mask = torch.zeros((len(group), longest), dtype=torch.long)
        for row, prompt in enumerate(group):
            ids[row, : len(prompt)] = torch.tensor(prompt)
            mask[row, : len(prompt)] = 1
        yield Batch(ids, mask)


def batch_modes(capture: Callable[[list[list[int]], list[int], int], Rows]) -> dict[str, Capture]:
    """Return the ways to feed a tool that takes padded batches: the usual one, with some care, and without padding.

    `capture` takes the prompts, the layers and the size of a batch.
    """

    def in_order(prompts: list[list[int]], layers: list[int]) -> Rows:
        return capture(prompts, layers, BATCH)

    def sorted_by_length(prompts: list[list[int]], layers: list[int]) -> Rows:
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        rows = capture([prompts[index] for index in order], layers, BATCH)
        return {layer: _put_back(parts, order, prompts) for layer, parts in rows.items()}

    def one_by_one(prompts: list[list[int]], layers: list[int]) -> Rows:
        return capture(prompts, layers, 1)

    return {
        f"batches of {BATCH}": in_order,
        f"batches of {BATCH}, sorted by length": sorted_by_length,
        "one by one": one_by_one,
    }


def _put_back(parts: list[torch.Tensor], order: list[int], prompts: list[list[int]]) -> list[torch.Tensor]:
    """Return the rows of each prompt in the prompts' own order, given those of the sorted prompts."""
    of_sorted = torch.cat(parts).split([len(prompts[index]) for index in order])
    return [rows for _, rows in sorted(zip(order, of_sorted, strict=True), key=lambda pair: pair[0])]


class Line:
    """The two ends of the conversation, and what the parent gave on the command line."""

    def __init__(self) -> None:
        self.model_folder = Path(sys.argv[1])
        self.prompts: list[list[int]] = json.loads(Path(sys.argv[2]).read_text())
        torch.set_num_threads(int(sys.argv[3]))
        self._answers = stdout_for_answers_only()

    def serve(self, distribution: str, modes: dict[str, Capture]) -> None:
        """Answer requests until there are no more. `modes` are the ways to do the work with this tool."""
        versions = {name: version(name) for name in (distribution, "transformers", "torch")}
        answer(self._answers, {"ready": distribution, "modes": list(modes), "versions": versions})
        for line in sys.stdin:
            request = json.loads(line)
            capture = modes[request["mode"]]
            if request["do"] == "run":
                answer(self._answers, _run(capture, self.prompts[: request["count"]], request["layers"]))
            else:
                rows = capture(self.prompts, request["layers"])
                save_file(_of_prompts(rows, self.prompts, request["prompts"]), request["file"])
                answer(self._answers, {"saved": request["file"]})


def stdout_for_answers_only() -> TextIO:
    """Keep stdout for answers: what libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer(answers: TextIO, said: dict) -> None:
    """Say one thing, on a line of its own."""
    answers.write(json.dumps(said) + "\n")
    answers.flush()


def _run(capture: Capture, prompts: list[list[int]], layers: list[int]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    rows = capture(prompts, layers)
    timing = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    return timing | {"rows": sum(part.shape[0] for part in rows[layers[0]])}


def _of_prompts(rows: Rows, prompts: list[list[int]], wanted: list[int]) -> dict[str, torch.Tensor]:
    """Return the rows of some prompts, named `<prompt>.<layer>`."""
    tensors: dict[str, torch.Tensor] = {}
    for layer, parts in rows.items():
        of_prompt = torch.cat(parts).split([len(prompt) for prompt in prompts])
        for prompt in wanted:
            tensors[f"{prompt}.{layer}"] = of_prompt[prompt].clone()
    return tensors
