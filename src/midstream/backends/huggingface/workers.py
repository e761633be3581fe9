"""Batches side by side on a CPU: a few threads of arithmetic each, which wait for one another less.

With all cores in one operation, every operation ends with the slowest of them. On two cores, two batches at a time, a
core each, took 0.85 of the time of one after the other on both (SmolLM2-135M in bfloat16, batches of 2,048 tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final

import torch
from torch.nn.modules import module as torch_module

from midstream.taps.locate import FAMILIES, Anatomy, text_config
from midstream.taps.passes import Passes

MAX_WORKERS: Final = 8
"""Each has a batch's activations in memory."""

Task = Callable[[], int]
"""Does some work, and returns how many tokens it settled."""


def worker_count(anatomy: Anatomy, passes: Passes, batches: int) -> int:
    """How many batches may run at once; 1 where something could notice that they do.

    That is: on a GPU, under steering (whose passes follow one another), in a model that is not listed (its modules may
    keep state between passes), and where a caller has hooks of his own, which may not bear it.
    """
    model: Any = anatomy.model
    device = model.get_input_embeddings().weight.device
    if device.type != "cpu" or passes.steerer is not None or text_config(model).model_type not in FAMILIES:
        return 1
    return 1 if hooked_by_others(anatomy) else max(1, min(torch.get_num_threads(), batches, MAX_WORKERS))


def even_workers(anatomy: Anatomy) -> int:
    """How many threads run batches, however many those are: so each pass has as many threads of arithmetic as all."""
    model: Any = anatomy.model
    device = model.get_input_embeddings().weight.device
    return min(torch.get_num_threads(), MAX_WORKERS) if device.type == "cpu" else 1


def hooked_by_others(anatomy: Anatomy) -> bool:
    """Whether modules have hooks besides ours."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:  # pyright: ignore
        return True
    return any(
        not (getattr(hook, "__module__", None) or "").startswith("midstream.")
        for module in anatomy.model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


def side_by_side(tasks: Sequence[Task], workers: int, threads: set[int], done: Callable[[int], None]) -> None:
    """Run tasks on `workers` threads, and tell `done` in this one; the first error ends what has not begun.

    threads: has the workers' idents while they run.
    """
    if workers == 1:
        for task in tasks:
            done(task())
        return
    share = max(1, torch.get_num_threads() // workers)

    def begin() -> None:
        torch.set_num_threads(share)
        threads.add(get_ident())

    with _as_before(threads), ThreadPoolExecutor(workers, "midstream", begin) as pool:
        pending: set[Future[int]] = {pool.submit(task) for task in tasks}
        try:
            while pending:
                ended, pending = wait(pending, return_when=FIRST_COMPLETED)
                for one in ended:
                    done(one.result())
        finally:
            for one in pending:
                one.cancel()


@contextmanager
def _as_before(threads: set[int]) -> Generator[None]:
    """Afterwards only this thread counts, and torch has its number of threads again.

    What torch gives to new threads is the last number that any thread has set.
    """
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
        threads.intersection_update({get_ident()})
