"""The speed of a capture: against the bare forward, and against what people do today. All figures in one run.

    python benchmarks/capture.py                    the published run: 256 prompts, 9 repetitions, an hour or two
    python benchmarks/capture.py --small --peers none
    python benchmarks/capture.py --more --repetitions 2     two more turns of a run that was made or stopped before

Writes its figures to build/benchmarks/capture.json (with --small, capture-small.json) for publish.py.
"""

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch
from environments import HERE, Tool, Unavailable, pinned, tools
from in_process import InProcess
from measure import Timing, take_turns, timed
from peer_process import PeerProcess
from prompts import make_prompts, save_prompts
from reference import PromptRows, RowError, checked_prompts, plain_rows, row_error
from transformers.utils import logging

from midstream.backends.bundled import smollm2_path

RESULTS = HERE.parent / "build" / "benchmarks"


@dataclass(frozen=True)
class Settings:
    """What to run."""

    small: bool
    prompts: int
    repetitions: int
    # Prompts on which each of a tool's modes is tried, before its better one takes part.
    trial: int
    peers: tuple[str, ...]
    threads: int
    torch: str
    out: Path
    # Whether to add to the figures that are there.
    more: bool


@dataclass
class Figures:
    """What came out, as plain data."""

    settings: dict
    versions: dict[str, str]
    rows: int = 0
    depth: int = 0
    # Subject → its runs; the subjects of one repetition ran one after the other.
    timings: dict[str, list[Timing]] = field(default_factory=dict)
    errors: dict[str, RowError] = field(default_factory=dict)
    # Tool → its version and the mode that counts, with the seconds of every mode on trial.
    peers: dict[str, dict] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    """One thing to time; `rows` gives its rows of the checked prompts, where it has any."""

    run: Callable[[], Timing]
    rows: Callable[[], PromptRows] | None = None


@dataclass
class Work:
    """One run of the benchmark: what to do it with, and where its figures go."""

    settings: Settings
    model_folder: Path
    prompts: list[list[int]]
    prompts_file: Path
    checked: list[int]
    figures: Figures


def main() -> None:
    settings = _read_arguments()
    begin_pinned(settings.threads)
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    # Written after every repetition, so that a run which is stopped leaves those that it did.
    for figures in measure(settings, smollm2_path()):
        settings.out.write_text(json.dumps(asdict(figures), indent=1) + "\n")
    tell(f"figures are in {settings.out}")


def begin_pinned(threads: int) -> None:
    """Pin the threads, and keep transformers quiet.

    Where the variables that pin are not set, the process begins again with them: torch reads them as it loads.
    """
    wanted = pinned(threads)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def measure(settings: Settings, model_folder: Path) -> Iterator[Figures]:
    """Run everything, and yield the figures so far at the end of each repetition."""
    prompts = make_prompts(model_folder, settings.prompts)
    figures = Figures(_plain(settings), environment_facts(), rows=sum(map(len, prompts)))
    if settings.more:
        figures.timings = earlier_timings(settings.out, figures.settings, figures.versions)
        figures.peers = json.loads(settings.out.read_text())["peers"]
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        prompts_file = scratch / "prompts.json"
        save_prompts(prompts, prompts_file)
        work = Work(settings, model_folder, prompts, prompts_file, checked_prompts(prompts), figures)
        figures.memory = _memory(work)
        here = InProcess(model_folder, prompts)
        figures.depth = here.depth
        subjects = in_process_subjects(here, work.checked) | _peer_subjects(work, stack)
        figures.errors = _errors(work, subjects)
        runs = {name: subject.run for name, subject in subjects.items()}
        done = min((len(of) for of in figures.timings.values()), default=0)
        figures.settings["repetitions"] = done + settings.repetitions
        for turn in range(done, done + settings.repetitions):
            for name, timing in take_turns(runs, turn):
                figures.timings.setdefault(name, []).append(timing)
                tell(f"repetition {turn + 1} of {done + settings.repetitions}: {name}: {timing.wall:.2f} s")
            yield figures


def earlier_timings(file: Path, settings: dict, versions: dict[str, str]) -> dict[str, list[Timing]]:
    """Return the runs that a file of figures holds, to go on with; refuse those of another kind."""
    figures = json.loads(file.read_text())
    changing = ("repetitions", "more", "out")
    theirs, ours = ({k: v for k, v in of.items() if k not in changing} for of in (figures["settings"], settings))
    if json.loads(json.dumps(ours)) != theirs or figures["versions"] != versions:
        sys.exit(f"{file} is of other settings or versions: make a new run")
    return {name: [Timing(**one) for one in of] for name, of in figures["timings"].items()}


def middle_of(depth: int) -> int:
    return depth // 2


def depths_of(depth: int) -> list[int]:
    """Return the blocks that are captured alone: the first past a quarter of the depth, the middle, the last."""
    return [-(-depth // 4), middle_of(depth), depth - 1]


def in_process_subjects(here: InProcess, checked: list[int]) -> dict[str, Subject]:
    """Return the bare forwards, midstream's captures, and the usual loop."""
    middle, last = middle_of(here.depth), here.depth - 1
    subjects = {
        f"bare {blocks}": Subject(functools.partial(timed, functools.partial(here.bare, blocks)))
        for blocks in (middle + 1, last + 1)
    }
    for layers in [*([k] for k in depths_of(here.depth)), None]:
        subjects[f"midstream {layers[0] if layers else 'all'}"] = Subject(
            functools.partial(timed, functools.partial(here.midstream, layers)),
            functools.partial(here.midstream_rows, layers, checked),
        )
    subjects["usual"] = Subject(
        lambda: timed(lambda: sum(map(len, here.usual(middle)))),
        lambda: here.usual_rows(middle, checked),
    )
    return subjects


def _peer_subjects(work: Work, stack: ExitStack) -> dict[str, Subject]:
    """Start the tools, each in its better mode; the reason why one cannot be measured goes to the figures."""
    subjects: dict[str, Subject] = {}
    for name in work.settings.peers:
        tell(f"{name}: preparing its environment")
        try:
            subjects[name] = _peer_subject(work, stack, tools()[name])
        except Unavailable as reason:
            tell(f"{name}: skipped: {reason}")
            work.figures.skipped[name] = str(reason)
    return subjects


def _peer_subject(work: Work, stack: ExitStack, tool: Tool) -> Subject:
    settings = work.settings
    peer = PeerProcess(
        tool,
        torch=settings.torch,
        model_folder=work.model_folder,
        prompts=work.prompts_file,
        threads=settings.threads,
        scratch=work.prompts_file.parent,
    )
    stack.callback(peer.close)
    layers = [middle_of(work.figures.depth)]
    if (known := work.figures.peers.get(tool.name)) is not None:  # go on as it began
        return _subject_of(work, peer, known["mode"], layers)
    trials = {mode: _trial(peer, mode, layers, settings.trial) for mode in peer.modes}
    tell(f"{tool.name}: " + ", ".join(f"{mode} {timing.wall:.2f} s" for mode, timing in trials.items()))
    mode = min(trials, key=lambda tried: trials[tried].wall)
    work.figures.peers[tool.name] = {"versions": peer.versions, "mode": mode, "trials": trials}
    return _subject_of(work, peer, mode, layers)


def _subject_of(work: Work, peer: PeerProcess, mode: str, layers: list[int]) -> Subject:
    return Subject(
        functools.partial(peer.run, mode, layers, len(work.prompts)),
        functools.partial(peer.rows, mode, layers, work.checked),
    )


def _trial(peer: PeerProcess, mode: str, layers: list[int], count: int) -> Timing:
    """Return the faster of two runs, so that a mode is not judged by its first."""
    return min((peer.run(mode, layers, count) for _ in range(2)), key=lambda timing: timing.wall)


def _errors(work: Work, subjects: dict[str, Subject]) -> dict[str, RowError]:
    """Compare every subject's rows with the float32 reference's. This pass also warms each subject up."""
    given = (work.model_folder, work.prompts, work.checked)
    reference = plain_rows(*given, torch.float32, attn_implementation="eager")
    plain = plain_rows(*given, torch.bfloat16)
    middle = middle_of(work.figures.depth)
    at_middle = {key: rows for key, rows in plain.items() if key[1] == middle}
    errors = {"plain": row_error(at_middle, reference), "plain all": row_error(plain, reference)}
    for name, subject in subjects.items():
        if subject.rows is None:
            subject.run()
        else:
            errors[name] = row_error(subject.rows(), reference)
        tell(f"{name}: warm" + (f", row error {errors[name].median:.4f}" if name in errors else ""))
    return errors


def _memory(work: Work) -> dict[str, dict[str, int]]:
    """Return the peak memory of the bare forward and of capturing every block, each in a fresh process."""
    memory: dict[str, dict[str, int]] = {}
    for what in ("bare", "capture"):
        given = (what, work.model_folder, work.prompts_file, work.settings.threads)
        command = [sys.executable, HERE / "memory.py", *given]
        done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True)
        memory[what] = json.loads(done.stdout.splitlines()[-1])
        tell(f"peak memory, {what}: {memory[what]['peak'] / 1e9:.2f} GB")
    return memory


def _read_arguments() -> Settings:
    parser = argparse.ArgumentParser(description="Measure the speed of a capture.")
    parser.add_argument("--small", action="store_true", help="24 prompts and 3 repetitions: does it run?")
    parser.add_argument("--repetitions", type=int, help="turns that every subject takes (9; small: 3)")
    parser.add_argument("--peers", default="all", help=f"none, all, or some of {','.join(tools())}")
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1), help="of every process")
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip is asked for in the tools' environments")
    parser.add_argument("--out", type=Path, help="file for the figures")
    parser.add_argument("--more", action="store_true", help="add repetitions to the figures that are there")
    given = parser.parse_args()
    peers = {"all": tuple(tools()), "none": ()}.get(given.peers, tuple(given.peers.split(",")))
    if unknown := set(peers) - set(tools()):
        parser.error(f"no peer {', '.join(sorted(unknown))}: there are {', '.join(tools())}")
    return Settings(
        small=given.small,
        prompts=24 if given.small else 256,
        repetitions=given.repetitions or (3 if given.small else 9),
        trial=16 if given.small else 64,
        peers=peers,
        threads=given.threads,
        torch=given.torch,
        out=given.out or RESULTS / ("capture-small.json" if given.small else "capture.json"),
        more=given.more,
    )


def _plain(settings: Settings) -> dict:
    return asdict(settings) | {"out": settings.out.name}


def environment_facts() -> dict[str, str]:
    """Return the versions and the processor that the figures are of."""
    packages = {name: version(name) for name in ("midstream", "torch", "transformers")}
    return packages | {"python": platform.python_version(), "processor": _processor()}


def _processor() -> str:
    """Return the processor's name, and whether it multiplies bfloat16 matrices itself: half of these figures."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    by_key = {key.strip(): value.strip() for key, value in facts.items()}
    name = by_key.get("model name") or platform.processor() or platform.machine()
    return f"{name} with AMX" if "amx_bf16" in by_key.get("flags", "").split() else name


def tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
