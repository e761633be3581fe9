"""`midstream harvest`: activations of a data set, to shards; run again, it goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from . import options
from .output import counted, print_json, say

if TYPE_CHECKING:
    from midstream.core.capture import CaptureSpec
    from midstream.core.probe import Probe
    from midstream.harvest import Report
    from midstream.harvest.spec import HarvestSpec


def harvest(
    model: options.Model,
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts",
            "-f",
            metavar="FILE",
            help="A .jsonl, .txt or .parquet file, a folder that `datasets` has saved, or - for stdin.",
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="DIR", help="Its directory, or a URL that fsspec knows, e.g. s3://….")
    ],
    layers: options.Layers = None,
    site: options.Sites = None,
    rows: Annotated[
        str | None,
        typer.Option("--rows", "-r", metavar="ROWS", help="Which rows, e.g. 'prompt[-1]'; every one if left out."),
    ] = None,
    dtype: options.StorageDtype = None,
    pool: Annotated[
        Literal["mean", "last"] | None,
        typer.Option("--pool", help="One row for each sample: the mean of its selected rows, or the last of them."),
    ] = None,
    probe: Annotated[
        list[Path] | None,
        typer.Option(
            "--probe",
            metavar="FILE",
            help="Keep the scores of this file's probes or directions in place of the rows; give it again for more.",
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", metavar="N", help="Tokens of the longest sequence; else the model's own.")
    ] = None,
    too_long: Annotated[
        Literal["refuse", "split", "truncate"],
        typer.Option("--too-long", help="What becomes of a document with more tokens."),
    ] = "refuse",
    pack: Annotated[
        bool, typer.Option("--pack", help="Lay documents one after the other, and cut every --context tokens.")
    ] = False,
    across: Annotated[
        bool, typer.Option("--across", help="With --pack: let the documents of a sequence attend to those before.")
    ] = False,
    stride: Annotated[
        int | None,
        typer.Option(
            "--stride", metavar="N", help="From a sequence's start to the next's, of what is split or packed."
        ),
    ] = None,
    no_special_tokens: options.NoSpecialTokens = False,
    shard_tokens: Annotated[
        int | None,
        typer.Option("--shard-tokens", metavar="N", help="Close a shard after so many tokens; else 131,072."),
    ] = None,
    shard_bytes: Annotated[
        int | None, typer.Option("--shard-bytes", metavar="N", help="Or after so many bytes of rows; else 536,870,912.")
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Of shards that are there, compare the sizes alone, not the hashes.")
    ] = False,
    refuse_nonfinite: Annotated[
        bool,
        typer.Option("--refuse-nonfinite", help="Stop at values that are NaN or infinite; else keep and count them."),
    ] = False,
    compiled: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="Compile the model's blocks; if left out, for large inputs, where it can be."
        ),
    ] = None,
    model_dtype: options.ComputeDtype = "auto",
    device: options.Device = "auto",
    backend: options.Backend = "huggingface",
    engine: options.EngineOptions = None,
    base_url: options.BaseUrl = None,
    json: options.Json = False,
) -> None:
    """Write the activations of a data set into a directory of shards.

    Run again, it goes on where it was stopped or killed, with the same bytes in the end; complete, it does nothing. A
    directory of another model, input or spec is refused. docs/harvest.md describes the files.
    """
    capture = options.capture_spec(layers, site, rows, dtype)
    spec = _spec(
        capture, pool=pool, context=context, too_long=too_long, packed=pack, across=across, stride=stride,
        add_special_tokens=not no_special_tokens, shard_tokens=shard_tokens, shard_bytes=shard_bytes,
    )  # fmt: skip
    if "://" not in out:
        options.check_out_directory(Path(out))
    probes = _probes(probe or ())
    from .model import opened

    with opened(
        model,
        dtype=model_dtype,
        device=device,
        backend=backend,
        engine=engine,
        base_url=base_url,
        dtype_option="--model-dtype",
    ) as lm:
        from midstream import harvest as room
        from midstream.harvest.bar import shown

        with shown() as told:
            report = room.run(
                lm,
                prompts,
                out,
                spec,
                probes=probes,
                trust=trust,
                refuse_nonfinite=refuse_nonfinite,
                compiled=compiled,
                told=told,
            )
    if json:
        print_json(_as_json(report))
    _say(report)


def _spec(capture: CaptureSpec, **more: Any) -> HarvestSpec:
    from midstream.harvest.spec import HarvestSpec

    return HarvestSpec(capture=capture, **{name: value for name, value in more.items() if value is not None})


def _probes(files: Sequence[Path]) -> list[Probe]:
    from midstream.formats.probe_file import read_probes

    return [one for file in files for one in read_probes(file)]


def _say(report: Report) -> None:
    counts = report.counts
    made = "nothing was left to do" if not report.made else f"{counted(report.made, 'shard')} of them made now"
    say(f"{report.place}: {counted(counts.samples, 'sample')}, {counted(counts.rows, 'row')} in "
        f"{counted(report.shards, 'shard')}; {made}")  # fmt: skip
    for what, count, more in (
        ("samples that continue a document which was split", counts.split, ""),
        ("documents that were truncated", counts.truncated, f" ({counts.dropped:,} tokens left out)"),
        ("values that are not finite", counts.nonfinite, " (samples.parquet says where)"),
        ("values that became infinite in the storage type", counts.overflowed, ""),
        ("samples that failed and have no rows", counts.failed, " (samples.parquet says why)"),
    ):
        if count:
            say(f"midstream: note: {what}: {count:,}{more}")


def _as_json(report: Report) -> dict[str, Any]:
    return {**dataclasses.asdict(report), "counts": report.counts.model_dump()}
