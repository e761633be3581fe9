"""The recorder and the steerer of one call, told of each forward pass together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident

import torch

from midstream.core.errors import MidstreamError

from .recorder import Recorder
from .steerer import Steerer
from .step import StepBatch


@dataclass(frozen=True)
class Passes:
    """What looks at the rows of a call's passes, and what changes them; either may be missing.

    threads: those whose passes these are; others that use the model meanwhile are left alone.
    """

    recorder: Recorder | None = None
    steerer: Steerer | None = None
    threads: set[int] = field(default_factory=lambda: {get_ident()})

    def begin(self, step: StepBatch, device: torch.device) -> None:
        """A pass over these rows is about to run."""
        if self.recorder is not None:
            self.recorder.begin(step, device)
        if self.steerer is not None:
            self.steerer.begin(step, device)

    def end(self) -> None:
        """The pass has run; CaptureError when a tap did not fire."""
        if self.recorder is not None:
            self.recorder.end()
        if self.steerer is not None:
            self.steerer.end()

    def fail(self, sample: int, requests: Sequence[int], error: MidstreamError) -> None:
        """Give up one sample, whose requests these are, also in the middle of its pass; the others stay."""
        if self.recorder is not None:
            self.recorder.fail(sample, error)
        if self.steerer is not None:
            self.steerer.fail(requests)
