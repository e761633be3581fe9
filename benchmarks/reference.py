"""The rows as they should be: plain hooks on the plain model, one prompt at a time, no padding, no cache."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

# Rows by prompt (its index among all) and layer.
PromptRows = dict[tuple[int, int], Tensor]


@dataclass(frozen=True)
class RowError:
    """‖row − reference‖ / ‖reference‖ over many rows."""

    median: float
    p99: float


def checked_prompts(prompts: list[list[int]], count: int = 8) -> list[int]:
    """Return the indices of a few prompts, from the shortest to the longest."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    count = min(count, len(order))
    return [order[place * (len(order) - 1) // (count - 1)] for place in range(count)]


def plain_rows(
    folder: Path, prompts: list[list[int]], wanted: list[int], dtype: torch.dtype, **options: str
) -> PromptRows:
    """Return the rows that every block leaves, read by forward hooks on a model that is loaded for it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    rows: PromptRows = {}
    for index in wanted:
        hooks = [
            block.register_forward_hook(_keep_in(rows, (index, layer)))
            for layer, block in enumerate(model.model.layers)
        ]
        with torch.inference_mode():
            model.model(input_ids=torch.tensor([prompts[index]]), use_cache=False)
        for hook in hooks:
            hook.remove()
    return rows


def _keep_in(rows: PromptRows, key: tuple[int, int]):
    def hook(_module: torch.nn.Module, _inputs: tuple, output: Tensor | tuple[Tensor, ...]) -> None:
        rows[key] = (output[0] if isinstance(output, tuple) else output)[0].clone()

    return hook


def row_error(rows: PromptRows, reference: PromptRows) -> RowError:
    """Compare all of `rows` with the reference's, each row relative to its own size."""
    errors = torch.cat([_relative(of.float(), reference[key].float()) for key, of in rows.items()])
    return RowError(errors.quantile(0.5).item(), errors.quantile(0.99).item())


def _relative(rows: Tensor, reference: Tensor) -> Tensor:
    return (rows - reference).norm(dim=-1) / reference.norm(dim=-1)
