"""interlens: `capture_activations`, which takes one sequence at a time and runs the whole model."""

import torch
from interlens.interp import CaptureSpec, capture_activations
from protocol import Line, Rows
from transformers import AutoModelForCausalLM


def main() -> None:
    line = Line()
    model = AutoModelForCausalLM.from_pretrained(line.model_folder, dtype=torch.bfloat16).eval()

    def one_by_one(prompts: list[list[int]], layers: list[int]) -> Rows:
        spec = CaptureSpec(sites=("residual",), layers=tuple(layers))
        rows: Rows = {layer: [] for layer in layers}
        for prompt in prompts:
            for captured in capture_activations(model, torch.tensor([prompt]), spec):
                rows[captured.layer].append(captured.tensor)
        return rows

    line.serve("interlens", {"one by one": one_by_one})


if __name__ == "__main__":
    main()
