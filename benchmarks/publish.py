"""Write the figures of the last runs of the benchmarks into docs/benchmarks.md, between their marks.

python benchmarks/publish.py capture|generate|vllm|cases|files|served|api [--figures FILE] [--print]
"""

import argparse
import json
import sys
from pathlib import Path

from engine_tables import render_api, render_cases, render_files, render_served, render_vllm
from measure import Timing, median_interval, ratio
from tables import ahead, error_of, met, shown, table

ROOT = Path(__file__).parent.parent
FIGURES = ROOT / "build" / "benchmarks"
PAGE = ROOT / "docs" / "benchmarks.md"

Runs = dict[str, list[Timing]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Publish the figures of a benchmark.")
    parser.add_argument("what", choices=tuple(RENDERERS), help="whose figures")
    parser.add_argument("--figures", type=Path, help="what the benchmark wrote")
    parser.add_argument("--print", action="store_true", help="print the tables and write nothing")
    given = parser.parse_args()
    file = given.figures or FIGURES / f"{given.what}.json"
    if not file.exists():
        sys.exit(f"publish: no {file}: run the benchmark first, make help lists them")
    figures = json.loads(file.read_text())
    block = RENDERERS[given.what](figures)
    if given.print:
        print(block)
        return
    if figures["settings"]["small"] or ("timings" in figures and _repetitions(figures) < 9):
        sys.exit("publish: a --small run, or one of fewer than 9 repetitions, shows nothing but that it works")
    PAGE.write_text(replaced(PAGE.read_text() if PAGE.exists() else "", given.what, block))
    print(f"publish: wrote {PAGE.relative_to(ROOT)}", file=sys.stderr)


def _repetitions(figures: dict) -> int:
    """Return how many repetitions were done, which is fewer than was asked for if the run was stopped."""
    return min(map(len, figures["timings"].values()))


def replaced(page: str, what: str, block: str) -> str:
    """Return the page with what stands between a benchmark's marks replaced."""
    first, last = f"<!-- bench:{what}:start -->", f"<!-- bench:{what}:end -->"
    before, start, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not start or not end:
        sys.exit(f"publish: {PAGE.relative_to(ROOT)} needs the lines {first} and {last}")
    return f"{before}{first}\n\n{block}\n\n{last}{after}"


def render_capture(figures: dict) -> str:
    """Return all that stands between the marks."""
    runs = {name: [Timing(**timing) for timing in timings] for name, timings in figures["timings"].items()}
    parts = [
        _setting(figures),
        "### Against the bare forward\n\n" + table(_BOUND_HEAD, _bound_rows(figures, runs)),
        "### Against what people do today\n\n" + table(_TODAY_HEAD, _today_rows(figures, runs)),
        *_skipped(figures),
        "### The same runs in absolute figures\n\n" + table(_ABSOLUTE_HEAD, _absolute_rows(figures, runs)),
    ]
    return "\n\n".join(parts)


def _setting(figures: dict) -> str:
    settings, versions = figures["settings"], figures["versions"]
    interval = median_interval([0.0] * _repetitions(figures))
    return (
        f"SmolLM2-135M in bfloat16; {settings['prompts']} prompts of 8 to 512 tokens, {figures['rows']:,} rows; "
        f"{settings['threads']} threads on {versions['processor']}; torch {versions['torch']}, "
        f"transformers {versions['transformers']}, "
        f"Python {versions['python']}. {_repetitions(figures)} repetitions, in each of which every subject ran "
        f"once. Ratios are taken within each repetition and given as the median with its "
        f"{interval.coverage:.0%} interval (order statistics); an aim is met when the interval "
        "reaches it (*even*: it holds 1, neither is faster). "
        "*Wall* is time on the clock, *CPU* the seconds of all cores. *Row error* is "
        "‖row − reference‖ / ‖reference‖, median and 99th percentile over the rows of eight prompts; the "
        "reference is the plain model in float32, one prompt at a time, eager attention. The plain model "
        f"in bfloat16, one prompt at a time, has {error_of(figures, 'plain')} at block {_middle(figures)} and "
        f"{error_of(figures, 'plain all')} over all blocks."
    )


_BOUND_HEAD = ("Captured, all rows", "Figure", "Wall", "CPU", "Aim", "Met", "Row error")


def _bound_rows(figures: dict, runs: Runs) -> list[tuple[str, ...]]:
    depth, middle = figures["depth"], _middle(figures)
    full = f"bare {depth}"
    rows = [_speed_row(figures, runs, f"block {middle}", f"midstream {middle}", f"bare {middle + 1}", 0.95)]
    for k in _alone(runs):
        wall, cpu = (ratio(runs[f"midstream {k}"], runs[full], clock) for clock in ("wall", "cpu"))
        aim = 1.1 * (k + 1) / depth
        rows.append(
            (
                f"block {k}",
                "time, of the bare forward of all blocks",
                shown(wall),
                shown(cpu),
                f"≤ {aim:.2f}",
                met(wall.stays_under(aim)),
                error_of(figures, f"midstream {k}"),
            )
        )
    rows.append(_speed_row(figures, runs, f"all {depth} blocks", "midstream all", full, 0.85))
    return [*rows, _memory_row(figures)]


def _speed_row(figures: dict, runs: Runs, what: str, subject: str, bare: str, aim: float) -> tuple[str, ...]:
    wall, cpu = (ratio(runs[bare], runs[subject], clock) for clock in ("wall", "cpu"))
    figure = "speed, of the bare forward of the same blocks"
    cells = (shown(wall), shown(cpu), f"≥ {aim:.2f}", met(wall.reaches(aim)))
    return (what, figure, *cells, error_of(figures, subject))


def _memory_row(figures: dict) -> tuple[str, ...]:
    bare, capture = figures["memory"]["bare"], figures["memory"]["capture"]
    extra = (capture["peak"] - bare["peak"]) / capture["captured"]
    figure = (
        f"peak memory over the bare forward's ({bare['peak'] / 1e9:.2f} GB, model and one batch), "
        f"of the {capture['captured'] / 1e9:.2f} GB captured"
    )
    return (f"all {figures['depth']} blocks", figure, f"{extra:.2f}", "", "≤ 1.20", met(extra <= 1.2), "")


_TODAY_HEAD = ("Tool", "How", "midstream's speed over it: wall", "CPU", "Aim", "Met", "Its row error")


def _today_rows(figures: dict, runs: Runs) -> list[tuple[str, ...]]:
    middle = _middle(figures)
    usual = "`output_hidden_states=True`, batches of 16 padded to the longest"
    rows = [_today_row(figures, runs, "usual", f"transformers {figures['versions']['transformers']}", usual, 3.5)]
    for name, peer in figures["peers"].items():
        title = f"{name} {peer['versions'][name]} (transformers {peer['versions']['transformers']})"
        rows.append(_today_row(figures, runs, name, title, _mode(peer), 1.0))
    own = ("midstream", f"`lm.capture(prompts, layers=[{middle}])`", "", "", "", "")
    return [*rows, (*own, error_of(figures, f"midstream {middle}"))]


def _today_row(figures: dict, runs: Runs, subject: str, title: str, how: str, aim: float) -> tuple[str, ...]:
    own = runs[f"midstream {_middle(figures)}"]
    wall, cpu = (ratio(runs[subject], own, clock) for clock in ("wall", "cpu"))
    aimed = (f"≥ {aim:.1f}", met(wall.reaches(aim))) if aim > 1 else ("> 1", ahead(wall))
    cells = (shown(wall), shown(cpu), *aimed)
    return (title, how, *cells, error_of(figures, subject))


def _mode(peer: dict) -> str:
    """Return the mode that counts, with how much slower the others were on trial."""
    best = peer["trials"][peer["mode"]]["wall"]
    others = [
        f"{mode} took {timing['wall'] / best:.1f} times as long"
        for mode, timing in peer["trials"].items()
        if mode != peer["mode"]
    ]
    return "; ".join([peer["mode"], *others])


def _skipped(figures: dict) -> list[str]:
    return [f"Not measured: {name} ({reason})." for name, reason in figures["skipped"].items()]


_ABSOLUTE_HEAD = ("Subject", "Rows per second", "Seconds", "CPU-seconds", "Row error")


def _absolute_rows(figures: dict, runs: Runs) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, timings in runs.items():
        speed = median_interval([timing.rows / timing.wall for timing in timings])
        wall = median_interval([timing.wall for timing in timings])
        cpu = median_interval([timing.cpu for timing in timings])
        cells = (f"{speed.median:,.0f} ({speed.low:,.0f} to {speed.high:,.0f})", shown(wall), shown(cpu))
        rows.append((_title(name, figures), *cells, error_of(figures, name)))
    return rows


def _title(subject: str, figures: dict) -> str:
    """Return a subject's name in words: `bare 16`, `midstream 15`, `midstream all`, `usual`, or a tool."""
    kind, _, which = subject.partition(" ")
    if kind == "bare":
        return f"bare forward of {which} blocks"
    if kind == "midstream":
        return f"midstream, {'all blocks' if which == 'all' else f'block {which}'}"
    return f"{'usual loop' if kind == 'usual' else kind}, block {_middle(figures)}"


def _middle(figures: dict) -> int:
    return figures["depth"] // 2


def _alone(runs: Runs) -> list[int]:
    """Return the blocks that midstream captured alone."""
    names = (name.removeprefix("midstream ") for name in runs if name.startswith("midstream "))
    return [int(which) for which in names if which != "all"]


_GENERATE_HEAD = ("What", "Figure", "Wall", "CPU", "Aim", "Met")


def render_generate(figures: dict) -> str:
    """Return what steering, generating and scoring cost."""
    runs = {name: [Timing(**timing) for timing in timings] for name, timings in figures["timings"].items()}
    settings, versions, checks = figures["settings"], figures["versions"], figures["checks"]
    interval = median_interval([0.0] * _repetitions(figures))
    rows = [
        _time_row(runs, "one spec for all", "time, of plain generation", "one spec", "plain", 1.05),
        _time_row(runs, "another spec for each", "time, of plain generation", "a spec each", "plain", 1.15),
        _time_row(
            runs, "plain generation", "time, of `model.generate` on the same batch", "plain", "model.generate", 1.0
        ),
    ]
    wall, cpu = (ratio(runs["score one by one"], runs["score"], clock) for clock in ("wall", "cpu"))
    figure = "speed, of a loop over the items"
    rows.append(("scoring", figure, shown(wall), shown(cpu), "≥ 3.0", met(wall.reaches(3.0))))
    score = f"{checks['score_mean_difference']:+.4f}"
    words = (
        f"SmolLM2-135M in bfloat16; {settings['requests']} requests in one batch, prompts of 16 tokens and up, "
        f"{settings['new_tokens']} new tokens each, greedy; a vector of its own at the middle block, on every row; "
        f"{settings['references']} references of {settings['reference_tokens']} tokens after prompts of up to 48. "
        f"{settings['threads']} threads on {versions['processor']}; torch {versions['torch']}, transformers "
        f"{versions['transformers']}, Python {versions['python']}. {_repetitions(figures)} repetitions in turns; "
        f"medians with their {interval.coverage:.0%} interval. Of the requests, {checks['same_tokens']:.0%} gave "
        f"`model.generate`'s very tokens, and {checks['steered']:.0%} other ones when steered; batched scores differ "
        f"from the loop's by {score} in the mean (bfloat16 changes with the batch)."
    )
    return f"{words}\n\n{table(_GENERATE_HEAD, rows)}"


def _time_row(runs: Runs, what: str, figure: str, subject: str, base: str, aim: float) -> tuple[str, ...]:
    wall, cpu = (ratio(runs[subject], runs[base], clock) for clock in ("wall", "cpu"))
    return (what, figure, shown(wall), shown(cpu), f"≤ {aim:.2f}", met(wall.stays_under(aim)))


RENDERERS = {
    "capture": render_capture,
    "generate": render_generate,
    "vllm": render_vllm,
    "cases": render_cases,
    "files": render_files,
    "served": render_served,
    "api": render_api,
}


if __name__ == "__main__":
    main()
