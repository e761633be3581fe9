"""nnsight: a trace over each batch, stopped after the deepest layer asked for."""

import torch
from nnsight import TransformersModel
from protocol import Line, Rows, batch_modes, padded_batches


def main() -> None:
    line = Line()
    model = TransformersModel(str(line.model_folder), task="text-generation", dtype=torch.bfloat16, dispatch=True)
    pad_id = model.tokenizer.pad_token_id

    def capture(prompts: list[list[int]], layers: list[int], size: int) -> Rows:
        rows: Rows = {layer: [] for layer in layers}
        with torch.inference_mode():
            for batch in padded_batches(prompts, pad_id, size):
                hidden = {}
                # The body stands on its own lines: nnsight reads it from the source.
                with model.trace(input_ids=batch.input_ids, attention_mask=batch.attention_mask) as tracer:
                    for layer in layers:
                        hidden[layer] = model.model.layers[layer].output.save()
                    tracer.stop()
                for layer in layers:
                    rows[layer].append(hidden[layer][batch.kept])
        return rows

    line.serve("nnsight", batch_modes(capture))


if __name__ == "__main__":
    main()
