"""All turns of a benchmark, and what is known after each."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from capture import tell
from measure import Timing, take_turns


def run_turns(
    runs: Mapping[str, Callable[[], Timing]],
    repetitions: int,
    figures: dict[str, Any],
    out: Path,
    beside: Callable[[], Mapping[str, Timing]] = dict,
) -> None:
    """Warm every subject, let all take their turns, and write what is known after each. beside: measured here."""
    timings: dict[str, list[Timing]] = {}
    for run in runs.values():
        run()
    beside()
    for turn in range(repetitions):
        for name, timing in (*take_turns(runs, turn), *beside().items()):
            timings.setdefault(name, []).append(timing)
            tell(f"repetition {turn + 1} of {repetitions}: {name}: {timing.wall:.2f} s")
        given = {name: [asdict(one) for one in of] for name, of in timings.items()}
        out.write_text(json.dumps(figures | {"timings": given}, indent=1) + "\n")
    tell(f"figures are in {out}")
