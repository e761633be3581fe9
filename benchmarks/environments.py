"""The other tools: what each needs, and an environment of its own, made on first use under `.envs/`."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ENVIRONMENTS = HERE / ".envs"


def pinned(threads: int) -> dict[str, str]:
    """Return the variables of every process that computes here.

    Threads wait for one another as torch's do by default, which is a fifth faster here than putting them to sleep.
    Another program on the machine then slows a run many times over: nothing else should run.
    """
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


@dataclass(frozen=True)
class Tool:
    """A tool to compare with: the script that drives it, and the requirements of its environment."""

    name: str
    script: str
    requirements: tuple[str, ...]
    # A folder saved by transformers 5 does not say what transformers 4 looks for.
    old_folder: bool = False


def tools() -> dict[str, Tool]:
    """Return the tools by name. They take the transformers of this environment unless they refuse it."""
    transformers = f"transformers=={version('transformers')}"
    listed = (
        Tool("transformer-lens", "transformer_lens_cache.py", ("transformer-lens==4.3.0", transformers)),
        Tool("nnsight", "nnsight_trace.py", ("nnsight==0.8.1", "accelerate", transformers)),
        Tool("interlens", "interlens_capture.py", ("interlens==0.1.77",), old_folder=True),
    )
    return {tool.name: tool for tool in listed}


class Unavailable(Exception):
    """A tool cannot be measured here; the message says why, in one line."""


def environment(tool: Tool, torch: str) -> Path:
    """Return the Python of the tool's environment, made anew if what it should hold has changed.

    `torch` is what pip is asked for to get torch, its options included.
    """
    folder = ENVIRONMENTS / tool.name
    python = folder / "bin" / "python"
    wanted = json.dumps([torch, *tool.requirements])
    stamp = folder / "requirements.json"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)])
    # All in one call, so that the pin of torch holds against what the tool would take.
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _run([*pip, *torch.split(), "numpy", "safetensors", *tool.requirements])
    stamp.write_text(wanted)
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")]
        raise Unavailable((errors or lines or [f"exit code {done.returncode}"])[-1])


def folder_for(tool: Tool, model_folder: Path) -> Path:
    """Return the folder the tool loads the model from: the model's own, or a copy that transformers 4 reads right.

    Without `rope_theta` at the top, transformers 4 takes a base of 10,000 and says nothing.
    """
    if not tool.old_folder:
        return model_folder
    folder = ENVIRONMENTS / "models" / f"{model_folder.name}-transformers-4"
    folder.mkdir(parents=True, exist_ok=True)
    for source in model_folder.iterdir():
        copy = folder / source.name
        if not copy.exists():
            copy.symlink_to(source.resolve())
    config = json.loads((model_folder / "config.json").read_text())
    rope = config["rope_parameters"]
    added = {"rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": config["dtype"]}
    _replace(folder / "config.json", config | added)
    tokenizer = json.loads((model_folder / "tokenizer_config.json").read_text())
    _replace(folder / "tokenizer_config.json", tokenizer | {"tokenizer_class": "PreTrainedTokenizerFast"})
    return folder


def _replace(path: Path, content: dict) -> None:
    path.unlink()  # a link to the model's own file, which must stay as it is
    path.write_text(json.dumps(content, indent=2) + "\n")
