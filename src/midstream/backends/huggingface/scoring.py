"""Log-probabilities of references, teacher-forced: many items in one pass, logits of the references' rows alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from midstream.core.errors import spec_error
from midstream.taps.locate import TapMap, text_config
from midstream.taps.passes import Passes
from midstream.taps.step import Run, step_of

from .decoding import decode_batches
from .entries import hooked
from .forward import Done, cache_argument, fresh_positions, input_device, moved, new_cache, rotary_boundary, split_at
from .jobs import Job

LOGIT_BYTES: Final = 1 << 28
"""Of the float32 logits of one pass."""


_OURS: Final = (
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "labels",
    "logits_to_keep", "return_dict", "kwargs",
)  # fmt: skip
"""Arguments of a forward that would contradict what we give it, or read of it."""


def _passed_on() -> set[str]:
    """What a forward of transformers takes as **kwargs for its attention functions."""
    from transformers.utils.generic import TransformersKwargs

    return set(TransformersKwargs.__optional_keys__ | TransformersKwargs.__required_keys__)


class Scorer:
    """Scores jobs on one model: each job's reference after its prompt, which ends where generation would begin."""

    def __init__(self, taps: TapMap, passes: Passes, done: Done, extra: dict[str, Any]) -> None:
        self.model: Any = taps.anatomy.model
        self.taps, self.passes, self.done, self.extra = taps, passes, done, extra
        self.device = input_device(self.model)
        self.padded = taps.pads_left
        names = inspect.signature(self.model.forward).parameters
        self._names = names
        known = set(names) | (_passed_on() if "kwargs" in names else set())
        for name in extra:
            if name in _OURS:
                raise spec_error("E_BAD_PARAM", f"generation.extra.{name}", "is set by midstream: leave it out")
            if name not in known:
                message = f"{type(self.model).__name__}'s forward takes no {name!r:.60}"
                raise spec_error("E_UNKNOWN_FIELD", f"generation.extra.{name}", message)

    def run(self, jobs: Sequence[Job], references: Sequence[Sequence[int]]) -> Tensor:
        """Log-probabilities `[jobs, reference length]`, float32, on the CPU."""
        length = len(references[0])
        if new_cache(self.model) is None and any(one.op.gate is not None for job in jobs for one in job.ops):
            raise spec_error("E_UNKNOWN_KIND", "steering", "this model's cache cannot be kept: a gate cannot be scored")
        out = torch.empty((len(jobs), length), dtype=torch.float32)
        together = {index: job.prompt.token_ids for index, job in enumerate(jobs) if not job.alone}
        room = max(1, LOGIT_BYTES // (4 * (length + 1) * text_config(self.model).vocab_size))
        sequences = {index: (*ids, *references[index][:-1]) for index, ids in together.items()}
        with fresh_positions(self.model):
            for part in split_at(rotary_boundary(self.model), sequences):
                for batch in decode_batches(part, 1, self.padded, rows=room):
                    out[batch] = self._score(jobs, references, batch, {})
            for index, job in enumerate(jobs):
                if job.alone:
                    with hooked(self.model, job.hooks):
                        out[[index]] = self._score(jobs, references, [index], dict(job.prompt.multi_modal_data))
        return out

    def _score(
        self, jobs: Sequence[Job], references: Sequence[Sequence[int]], batch: Sequence[int], inputs: dict[str, Any]
    ) -> Tensor:
        length = len(references[batch[0]])
        gated = any(one.op.gate is not None and not one.op.silent for index in batch for one in jobs[index].ops)
        prompts = [jobs[index].prompt.token_ids for index in batch]
        tails = [references[index][:-1] for index in batch]
        if gated:  # decided at the prompt's end, and wanted by shallower layers of the rows after it
            cache = new_cache(self.model)
            first = self._forward(batch, prompts, [0] * len(batch), prompts, inputs, cache, keep=1)
            logits = [first]
            if length > 1:
                starts = [len(ids) for ids in prompts]
                logits.append(self._forward(batch, tails, starts, prompts, {}, cache, keep=length - 1))
            scores = torch.cat(logits, dim=1)
        else:
            whole = [(*ids, *tail) for ids, tail in zip(prompts, tails, strict=True)]
            scores = self._forward(batch, whole, [0] * len(batch), prompts, inputs, None, keep=length)
        self.done(sum(len(jobs[index].prompt.token_ids) + length for index in batch))
        return self._of_references(jobs, references, batch, scores.float().clone())

    def _of_references(
        self, jobs: Sequence[Job], references: Sequence[Sequence[int]], batch: Sequence[int], scores: Tensor
    ) -> Tensor:
        """`[batch, length]` of scores `[batch, length, vocabulary]`, after each job's own processors."""
        for row, index in enumerate(batch):
            shaping = jobs[index].shaping()
            if shaping.shapes:
                ids = [*jobs[index].prompt.token_ids]
                for place, token in enumerate(references[index]):
                    scores[row, place] = shaping.scores(ids, scores[row, place])
                    ids.append(token)
        wanted = torch.tensor([list(references[index]) for index in batch], device=scores.device)
        chosen = scores.gather(2, wanted[:, :, None])[:, :, 0]
        return (chosen - scores.logsumexp(-1)).cpu()

    def _forward(
        self,
        batch: Sequence[int],
        ids: Sequence[Sequence[int]],
        starts: Sequence[int],
        prompts: Sequence[Sequence[int]],
        inputs: dict[str, Any],
        cache: Any,
        keep: int,
    ) -> Tensor:
        """One pass over ids padded on the left, each from its start on; the logits of the last `keep` columns."""
        width = max(map(len, ids))
        tokens = torch.zeros((len(ids), width), dtype=torch.long)
        runs: list[Run] = []
        total = max(start + len(row) for start, row in zip(starts, ids, strict=True)) if cache is not None else width
        mask = torch.zeros((len(ids), total), dtype=torch.long)
        for place, (index, row) in enumerate(zip(batch, ids, strict=True)):
            tokens[place, width - len(row) :] = torch.tensor(row)
            mask[place, total - starts[place] - len(row) :] = 1
            runs.append(Run(index, place * width + width - len(row), starts[place], row, len(prompts[place])))
        kwargs: dict[str, Any] = {"use_cache": cache is not None} if "use_cache" in self._names else {}
        if cache is not None:
            kwargs[cache_argument(self.model) or "cache"] = cache
        if "logits_to_keep" in self._names:
            kwargs["logits_to_keep"] = keep
        if self.padded:
            kwargs["attention_mask"] = mask.to(self.device)
            if not inputs and "position_ids" in self._names:
                kwargs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:].to(self.device)
        self.passes.begin(step_of(runs, tokens.numel()), self.device)
        with torch.inference_mode():
            output = self.model(input_ids=tokens.to(self.device), **kwargs, **moved(self.model, inputs), **self.extra)
        self.passes.end()
        logits = output[0] if isinstance(output, tuple) else output.logits
        return logits[:, -keep:]
