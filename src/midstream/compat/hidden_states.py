"""vLLM's `load_hidden_states`."""

from __future__ import annotations

from os import PathLike

from torch import Tensor

from midstream.formats import hidden_states_file


def load_hidden_states(path: str | PathLike[str]) -> dict[str, Tensor]:
    """What vLLM's function of this name returns: `hidden_states` `[tokens, layers, hidden]` and `token_ids`.

    Reads vLLM's files and ours, and sleeps while a writer holds the file's lock. Unlike vLLM's it also reads
    a file whose lock was cleared away or never made, and its tensors own their memory.
    `midstream.formats.hidden_states_file.read` waits with a timeout and gives the layer ids too.
    """
    return hidden_states_file.read_tensors(path)
