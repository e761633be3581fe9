"""Time and memory: turns taken in one run, ratios per repetition, medians with an interval that holds for any noise."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path


@dataclass(frozen=True)
class Timing:
    """One run: seconds on the clock, seconds of all cores, and the rows that it gave."""

    wall: float
    cpu: float
    rows: int


@dataclass(frozen=True)
class Interval:
    """A median, and two of the values between which the true median lies with probability `coverage`."""

    median: float
    low: float
    high: float
    coverage: float

    def reaches(self, aim: float) -> bool:
        """Whether a figure that should be large may be as large as `aim`."""
        return self.high >= aim

    def stays_under(self, aim: float) -> bool:
        """Whether a figure that should be small may be as small as `aim`."""
        return self.low <= aim


def timed(work: Callable[[], int]) -> Timing:
    """Run `work`, which returns its number of rows, on both clocks."""
    wall, cpu = time.perf_counter(), time.process_time()
    rows = work()
    return Timing(time.perf_counter() - wall, time.process_time() - cpu, rows)


def take_turns(subjects: Mapping[str, Callable[[], Timing]], turn: int) -> Iterator[tuple[str, Timing]]:
    """Run every subject once, and yield each as it ends: whatever slows the machine for a while slows all of them.

    The order shifts with the turn, so that no subject always follows the same other.
    """
    names = list(subjects)
    shift = turn % len(names)
    for name in names[shift:] + names[:shift]:
        yield name, subjects[name]()


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the median with the narrowest pair of order statistics that covers it with this confidence.

    It assumes nothing about the noise but that the values are independent. Five values or fewer cannot give
    0.95: then it is the smallest and the largest, with what they do cover.
    """
    ordered = sorted(values)
    n = len(ordered)
    inner = [rank for rank in range(n // 2) if _coverage(n, rank) >= confidence]
    rank = max(inner, default=0)
    return Interval(statistics.median(ordered), ordered[rank], ordered[n - 1 - rank], _coverage(n, rank))


def _coverage(n: int, rank: int) -> float:
    """Return the probability that the true median lies between the values `rank` places from either end."""
    outside = sum(comb(n, k) for k in range(rank + 1)) / 2**n
    return max(0.0, 1 - 2 * outside)


def ratio(of: Sequence[Timing], to: Sequence[Timing], clock: str) -> Interval:
    """Return seconds per row of one over seconds per row of the other, pair by pair in each repetition."""
    return median_interval(
        [(getattr(a, clock) / a.rows) / (getattr(b, clock) / b.rows) for a, b in zip(of, to, strict=True)]
    )


def peak_memory() -> int:
    """Return the most bytes that this process has had resident.

    Linux' getrusage counts what the parent had when it started this process; its status file does not.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
