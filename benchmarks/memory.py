"""Peak memory of one way to run the prompts, in a process that does nothing else; one JSON object on stdout.

python benchmarks/memory.py bare|capture MODEL_FOLDER PROMPTS_FILE THREADS
"""

import json
import sys
from pathlib import Path

import torch
from in_process import InProcess
from measure import peak_memory
from prompts import load_prompts
from transformers.utils import logging


def main(what: str, model_folder: str, prompts_file: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    logging.disable_progress_bar()
    subject = InProcess(Path(model_folder), load_prompts(Path(prompts_file)))
    loaded = peak_memory()
    captured = 0
    if what == "bare":
        subject.bare(subject.depth)
    else:
        result = subject.language_model.capture(subject.prompts)
        captured = sum(result.rows(layer).nbytes for layer in result.layer_ids)
    print(json.dumps({"loaded": loaded, "peak": peak_memory(), "captured": captured}))


if __name__ == "__main__":
    main(*sys.argv[1:])
