"""What only a GPU can show: captures and steers under full, piecewise and no graphs, beside the model in process.

    make gpu-check                                    everything, then the speed of each form (benchmarks/engines.py)
    .venv-vllm/bin/python tools/gpu_check.py --forms none --no-speed      what runs without a GPU too

Prints, per form, the rows' errors: ‖row − reference‖ / ‖reference‖, the reference midstream in process, float32, over
the text that the engine made, alone; `plain` is the same in bfloat16. Ends with 1 where a form is worse than
1.25 × plain + 0.001, at the median or the 99th percentile.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import midstream as ms
from midstream.backends.bundled import smollm2_path

ROOT = Path(__file__).parent.parent
FORMS: dict[str, dict[str, Any]] = {
    "none": {"enforce_eager": True},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "full": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
}
NEW_TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description="Check taps under CUDA graphs.")
    parser.add_argument("--model", default=str(smollm2_path()), help="a folder or hub id (SmolLM2-135M)")
    parser.add_argument("--forms", default=",".join(FORMS), help=f"some of {', '.join(FORMS)}")
    parser.add_argument("--no-speed", action="store_true", help="leave out the benchmark")
    given = parser.parse_args()
    forms = given.forms.split(",")
    if unknown := set(forms) - set(FORMS):
        parser.error(f"no form {', '.join(sorted(unknown))}: there are {', '.join(FORMS)}")
    if set(forms) != {"none"} and not torch.cuda.is_available():
        parser.error("there is no GPU here: --forms none --no-speed is all that runs without one")
    torch.manual_seed(0)
    vocabulary = vocabulary_of(given.model)
    prompts = [torch.randint(3, vocabulary, (size,)).tolist() for size in (1, 7, 33, 64, 150, 200, 12, 90)]
    worse = [form for form in forms if not check(form, given.model, prompts)]
    if not given.no_speed:
        modes = ",".join({"none": "graphs-off"}.get(form, form) for form in forms)
        run = [sys.executable, str(ROOT / "benchmarks" / "engines.py"), "--modes", modes]
        figures = ROOT / "build" / "benchmarks" / "gpu.json"
        subprocess.run([*run, "--python", sys.executable, "--out", str(figures)], check=True)
        show = [sys.executable, str(ROOT / "benchmarks" / "publish.py"), "vllm", "--figures", str(figures), "--print"]
        subprocess.run(show, check=True)
    if worse:
        sys.exit(f"gpu-check: worse than the plain model: {', '.join(worse)}")


def vocabulary_of(model: str) -> int:
    """How many token ids a model has."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)


def check(form: str, model: str, prompts: list[list[int]]) -> bool:
    """Capture and steer under one form, and print how far the rows are from the reference."""
    engine = {"max_model_len": 512, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 30, **FORMS[form]}
    given: dict[str, Any] = {"max_tokens": NEW_TOKENS, "ignore_eos": True}
    with ms.load(model, backend="vllm", dtype="bfloat16", engine_kwargs=engine) as lm:
        middle, width = lm.facts.num_layers // 2, lm.facts.hidden_size
        vector = torch.randn(width)
        specs: dict[str, ms.InterventionSpec | None] = {
            "plain requests": None,
            "an add at each row": ms.add(vector, layers=[middle], strength=4.0),
            "an ablation at each row": ms.ablate(vector, layers=[middle]),
        }
        found = {what: lm.capture(prompts, steering=spec, **given) for what, spec in specs.items()}
        some = lm.capture(prompts, rows="generated", layers=[middle], **given)
        again = found["plain requests"].rows(middle)[torch.from_numpy(found["plain requests"].labels.generated)]
        good = bool(torch.equal(some.rows(middle), again))
        print(f"{form}: decode rows alone are those among all: {good}", flush=True)
    for what, cap in found.items():
        errors, plain = row_errors(model, cap, specs[what])
        met = all(mine <= 1.25 * theirs + 1e-3 for mine, theirs in zip(errors, plain, strict=True))
        good = good and met
        shown = {"median": errors[0], "p99": errors[1], "plain median": plain[0], "plain p99": plain[1]}
        numbers = json.dumps({name: round(value, 5) for name, value in shown.items()})
        print(f"{form}: {what}: {numbers} {'met' if met else 'NOT MET'}", flush=True)
    return good


def row_errors(model: str, cap: ms.CaptureResult, spec: Any) -> tuple[Sequence[float], Sequence[float]]:
    """Median and 99th percentile of the rows' errors, of the engine and of the plain model in bfloat16."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    texts = [[*one.prompt_token_ids, *one.token_ids[:-1]] for one in cap.outputs]

    def of(dtype: torch.dtype) -> dict[int, torch.Tensor]:
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager").to(device)
        rows = [ms.load(loaded).capture([ids], steering=spec) for ids in texts]
        return {layer: torch.cat([one.rows(layer) for one in rows]).double() for layer in cap.layer_ids}

    reference, half = of(torch.float32), of(torch.bfloat16)
    quantiles = torch.tensor([0.5, 0.99], dtype=torch.float64)

    def errors(mine: dict[int, torch.Tensor]) -> Sequence[float]:
        each = [(mine[layer] - rows).norm(dim=1) / rows.norm(dim=1) for layer, rows in reference.items()]
        return torch.cat(each).quantile(quantiles).tolist()

    return errors({layer: cap.rows(layer).double() for layer in cap.layer_ids}), errors(half)


if __name__ == "__main__":
    main()
