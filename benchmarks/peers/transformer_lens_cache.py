"""transformer-lens: `run_with_cache` with a filter on names, stopped after the deepest layer asked for."""

import torch
from protocol import Line, Rows, batch_modes, padded_batches
from transformer_lens.model_bridge import TransformerBridge


def main() -> None:
    line = Line()
    model = TransformerBridge.boot_transformers(str(line.model_folder), dtype=torch.bfloat16, device="cpu")
    depth = model.cfg.n_layers
    pad_id = model.tokenizer.pad_token_id

    def capture(prompts: list[list[int]], layers: list[int], size: int) -> Rows:
        names = {layer: f"blocks.{layer}.hook_out" for layer in layers}
        # Past the last block there is nothing to stop before: then the model runs to its end.
        stop = max(layers) + 1 if max(layers) + 1 < depth else None
        rows: Rows = {layer: [] for layer in layers}
        with torch.inference_mode():
            for batch in padded_batches(prompts, pad_id, size):
                _, cache = model.run_with_cache(
                    batch.input_ids,
                    attention_mask=batch.attention_mask if size > 1 else None,
                    names_filter=list(names.values()),
                    stop_at_layer=stop,
                    return_type=None,
                    return_cache_object=False,
                )
                for layer, name in names.items():
                    rows[layer].append(cache[name][batch.kept])
        return rows

    line.serve("transformer-lens", batch_modes(capture))


if __name__ == "__main__":
    main()
