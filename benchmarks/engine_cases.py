"""The same requests on taps and on vllm-lens, where the scheduler makes it hard: are the rows all there, and right?

    python benchmarks/engine_cases.py            every case, some minutes
    python benchmarks/engine_cases.py --cases chunks,again

SmolLM2-135M in float32, three layers, beside transformers' plain forward of each text alone. Needs .venv-vllm
(`make setup-vllm`); vllm-lens gets an environment of its own. Writes build/benchmarks/cases.json for publish.py.
"""

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from capture import RESULTS, environment_facts, tell
from engines import VLLM_PYTHON, lens_python
from environments import HERE, Unavailable
from peer_process import LineProcess
from prompts import make_prompts
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from midstream.backends.bundled import smollm2_path

LAYERS = [0, 15, 29]
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "block_size": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
}
TOOLS = ("midstream", "lens")


@dataclass(frozen=True)
class Case:
    """Calls to one engine, of whose last the rows are looked at. A prompt: (which text, its number of tokens)."""

    what: str
    prompts: tuple[tuple[int, int], ...]
    max_tokens: int = 1
    n: int = 1
    steered: tuple[int, ...] = ()
    before: tuple["Case", ...] = ()
    engine: dict[str, Any] = field(default_factory=dict)


MIXED = ((0, 200), (1, 90), (2, 33), (3, 64), (4, 7), (5, 1))
ONE = ((0, 200),)
CASES = {
    "mixed": Case("prompts of 1 to 200 tokens in one batch, and five tokens of each", MIXED, 5),
    "chunks": Case("the same in chunks of 64 tokens", MIXED, 5, engine={"max_num_batched_tokens": 64}),
    "again": Case("the same again, from the prefix cache", MIXED, 5, before=(Case("", MIXED, 5),)),
    "preempted": Case(
        "four prompts in a cache that is too small for them: preempted and run again",
        tuple((text, 48) for text in range(4)),
        60,
        engine={"num_gpu_blocks_override": 9, "max_model_len": 256},
    ),
    "choices": Case("n = 3", ((0, 40), (1, 9)), 5, n=3),
    "steered": Case("two of five prompts steered", MIXED[:5], 5, steered=(0, 3)),
    "after": Case("a plain prompt after the same one steered", ONE, 5, before=(Case("", ONE, 5, steered=(0,)),)),
    "continued": Case(
        "a longer prompt after a steered one that begins it", ((0, 230),), 5, before=(Case("", ONE, 5, steered=(0,)),)
    ),
}  # fmt: skip


class Asked(LineProcess):
    """One tool's engine; Unavailable where it does not come up, or ends."""

    def __init__(self, tool: str, case: Case, torch_wanted: str, scratch: Path) -> None:
        python = VLLM_PYTHON if tool == "midstream" else lens_python(torch_wanted)
        script = HERE / "peers" / "engine_cases.py"
        engine, layers = json.dumps(ENGINE | case.engine), json.dumps(LAYERS)
        plugin = {"midstream": "midstream", "lens": "activations"}[tool]
        variables = {"VLLM_PLUGINS": plugin, "VLLM_LOGGING_LEVEL": "WARNING"}
        super().__init__(tool, [python, script, tool, smollm2_path(), engine, layers], 2, scratch, **variables)
        self._file = scratch / f"{tool}-rows.safetensors"

    def call(self, case: Case, texts: list[list[int]], vector: Tensor) -> tuple[list[list[int]], dict[str, Tensor]]:
        steers = [vector.tolist() if i in case.steered else None for i in range(len(case.prompts))]
        prompts = [texts[text][:size] for text, size in case.prompts]
        asked = {"prompts": prompts, "max_tokens": case.max_tokens, "n": case.n, "steers": steers}
        answer = self.ask({**asked, "file": str(self._file)})
        return answer["tokens"], load_file(self._file)


@dataclass(frozen=True)
class Finding:
    """What a tool gave for a case: rows that were due and given, and their largest relative error; or its error."""

    due: int = 0
    given: int = 0
    worst: float = 0.0
    failed: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the same hard requests to taps and to vllm-lens.")
    parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is asked for in vllm-lens' environment")
    parser.add_argument("--out", help="file for the findings")
    given = parser.parse_args()
    names = given.cases.split(",")
    if unknown := set(names) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}: there are {', '.join(CASES)}")
    RESULTS.mkdir(parents=True, exist_ok=True)
    joined = [token for ids in make_prompts(smollm2_path(), 64) for token in ids]
    texts = [joined[i * 256 : (i + 1) * 256] for i in range(6)]
    vector = 20.0 * torch.nn.functional.normalize(torch.randn(576, generator=torch.Generator().manual_seed(0)), dim=0)
    model = AutoModelForCausalLM.from_pretrained(smollm2_path(), dtype=torch.float32, attn_implementation="eager")
    found: dict[str, dict[str, Any]] = {name: {"what": CASES[name].what} for name in names}
    versions: dict[str, Any] = environment_facts()
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            for tool in TOOLS:
                finding, of = _found(tool, CASES[name], texts, vector, model, given.torch, Path(scratch))
                found[name][tool] = asdict(finding)
                versions |= of
                tell(f"{name}: {tool}: {finding}")
    out = Path(given.out or RESULTS / "cases.json")
    settings = {"small": set(names) != set(CASES)}
    out.write_text(json.dumps({"settings": settings, "versions": versions, "cases": found}, indent=1) + "\n")
    tell(f"findings are in {out}")


def _found(
    tool: str, case: Case, texts: list[list[int]], vector: Tensor, model: Any, torch_wanted: str, scratch: Path
) -> tuple[Finding, dict[str, str]]:
    try:
        process = Asked(tool, case, torch_wanted, scratch)
    except Unavailable as reason:
        return Finding(failed=str(reason)), {}
    try:
        for earlier in case.before:
            process.call(earlier, texts, vector)
        tokens, rows = process.call(case, texts, vector)
    except Unavailable as reason:
        return Finding(failed=str(reason)), process.versions
    finally:
        process.close()
    due = given = 0
    worst = 0.0
    for i, ids in enumerate(tokens):
        text, size = case.prompts[i // case.n]
        steer = vector if i // case.n in case.steered else None
        reference = _reference(model, [*texts[text][:size], *ids[:-1]], steer)
        for layer, right in reference.items():
            mine = rows.get(f"{i}.{layer}", right[:0]).float()
            due, given = due + len(right), given + len(mine)
            common = min(len(mine), len(right))
            errors = (mine[:common] - right[:common]).norm(dim=1) / right[:common].norm(dim=1)
            worst = max(worst, float(errors.nan_to_num(torch.inf).max())) if common else worst
    return Finding(due, given, worst), process.versions


@torch.inference_mode()
def _reference(model: Any, ids: list[int], steer: Tensor | None) -> dict[int, Tensor]:
    """What each layer leaves of one text alone, the middle one after the vector was added to it."""
    rows: dict[int, Tensor] = {}

    def left(layer: int, output: Any) -> Any:
        stream = output[0] if isinstance(output, tuple) else output
        if steer is not None and layer == LAYERS[1]:
            stream = stream + steer
        rows[layer] = stream[0].clone()
        return (stream, *output[1:]) if isinstance(output, tuple) else stream

    hooks = [
        model.model.layers[layer].register_forward_hook(lambda _, __, output, layer=layer: left(layer, output))
        for layer in LAYERS
    ]
    model.model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return rows


if __name__ == "__main__":
    main()
