"""The prompts of the benchmarks: real text that ships with Python, cut into pieces of seeded lengths."""

import json
import random
from pathlib import Path
from pydoc_data import topics

from tokenizers import Tokenizer

SHORTEST = 8
LONGEST = 512
SEED = 20


def make_prompts(model_folder: Path, count: int) -> list[list[int]]:
    """Return `count` lists of token ids, 8 to 512 each, the same on every call.

    Each is the next piece of one long text, so that no two begin alike: no tool gains by a shared prefix.
    """
    lengths = random.Random(SEED)
    wanted = [lengths.randint(SHORTEST, LONGEST) for _ in range(count)]
    ids = _token_ids(model_folder, at_least=sum(wanted))
    prompts: list[list[int]] = []
    start = 0
    for length in wanted:
        prompts.append(ids[start : start + length])
        start += length
    return prompts


def equal_prompts(model_folder: Path, count: int, size: int) -> list[list[int]]:
    """Return `count` lists of `size` token ids: pieces of the same text."""
    joined = [token for ids in make_prompts(model_folder, 256) for token in ids]
    return [joined[i * size : (i + 1) * size] for i in range(count)]


def _token_ids(model_folder: Path, at_least: int) -> list[int]:
    """Return the ids of Python's language reference, as far as they are needed."""
    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    ids: list[int] = []
    for _, text in sorted(topics.topics.items()):
        ids += tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) >= at_least:
            return ids
    raise ValueError(f"Python's language reference has {len(ids)} tokens, {at_least} are needed")


def save_prompts(prompts: list[list[int]], path: Path) -> None:
    path.write_text(json.dumps(prompts) + "\n")


def load_prompts(path: Path) -> list[list[int]]:
    return json.loads(path.read_text())
