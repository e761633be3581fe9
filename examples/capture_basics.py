"""Capture, look at the labels, save, load: the whole of midstream in one page.

python examples/capture_basics.py
python examples/capture_basics.py --model path-or-hub-id --out capture.safetensors
"""

import argparse
import tempfile
from pathlib import Path

import midstream as ms

PROMPTS = [
    "The capital of France is",
    "Water boils at",
    "Steering means",
    "A much longer prompt, so that a batch of these four has to be padded:",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Capture from a few prompts and look at what came back.")
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id, or smollm2 (bundled)")
    parser.add_argument("--out", type=Path, help="the capture file (default: a temporary one)")
    parser.add_argument("--small", action="store_true", help="two prompts, for a quick look")
    given = parser.parse_args()

    with ms.load(given.model) as lm:
        layers = [lm.facts.num_layers // 3, 2 * lm.facts.num_layers // 3]
        prompts = PROMPTS[:2] if given.small else PROMPTS

        # Every row of the prompts, and of 4 tokens that follow them.
        cap = lm.capture(prompts, layers=layers, max_tokens=5)
        print(cap)
        print("receipt:", cap.receipt)
        for index, output in enumerate(cap.outputs):
            print(f"\nprompt {index}: {prompts[index]!r} → {output.text!r}")
            for row, values in zip(cap.tokens(index), cap.sample(index)[layers[0]], strict=True):
                phase = "generated" if row.position >= len(output.prompt_token_ids) else "prompt"
                print(f"  position {row.position:2d}  {phase:9s}  {row.text!r:14}  norm {values.float().norm():8.1f}")

        # One row of each prompt, at two sites: the row that predicts the next token.
        last = lm.capture(prompts, layers=layers, sites=["resid_post", "attn_out"], rows="prompt[-1]")
        attention = last.rows(layers[0], site="attn_out")
        print(f"\nlast rows: resid_post {tuple(last.rows(layers[0], site='resid_post').shape)},", end=" ")
        print(f"attn_out {tuple(attention.shape)}")

        # Padded to a rectangle, with a mask that says what is real.
        rows, mask = cap.padded(layers[0])
        print(f"padded: {tuple(rows.shape)}, of which {int(mask.sum())} rows are real")

    with tempfile.TemporaryDirectory() as scratch:
        path = cap.save(given.out or Path(scratch) / "capture.safetensors")
        again = ms.CaptureResult.load(path)
        assert again.labels == cap.labels
        assert all(again.rows(layer).equal(cap.rows(layer)) for layer in layers)
        print(f"saved {path.stat().st_size} bytes and read them back, equal to the bit")


if __name__ == "__main__":
    main()
