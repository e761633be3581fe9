"""`midstream inspect`: what is in a capture file, or in one of vLLM's hidden-states files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from . import options
from .output import counted, number, print_json, print_table, say, size

if TYPE_CHECKING:
    from midstream.core.result import CaptureResult

_SAMPLES: Final = 3
_TOKENS: Final = 24


def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A capture file, or one of vLLM's hidden-states files.")],
    layers: Annotated[
        list[str] | None, typer.Option("--layer", "--layers", "-l", metavar="LAYERS", help="Only these, e.g. 10,20.")
    ] = None,
    site: Annotated[
        list[str] | None, typer.Option("--site", "-s", metavar="SITE", help="Only these sites, e.g. resid_post.")
    ] = None,
    heatmap: Annotated[
        Path | None, typer.Option("--heatmap", metavar="PAGE", help="Also write a page to look at, e.g. page.html.")
    ] = None,
    layer_ids: Annotated[
        str | None,
        typer.Option("--layer-ids", metavar="IDS", help="The aux layer ids of a vLLM file that does not say them."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Show what a capture file holds.

    That is the model, rows, sites, layers, norms, and the first prompts' tokens. With --heatmap it also writes
    one HTML page that shows every layer and token, and needs nothing but itself.
    """
    ids, sites = options.layer_ids(layers, "--layer"), options.site_names(site)
    if heatmap is not None:
        options.check_out_file(heatmap, "--heatmap", "page.html")
    held = _read(file, options.layer_ids([layer_ids] if layer_ids else None, "--layer-ids"))
    held = replace(held, capture=_narrowed(held.capture, ids, sites))
    if heatmap is not None:
        _write_page(held.capture, heatmap)
    if json:
        print_json(held.as_json())
    else:
        held.print()


@dataclass(frozen=True)
class _Held:
    """A file's content and what it is called."""

    path: Path
    kind: str
    capture: CaptureResult

    def about(self) -> list[tuple[str, str]]:
        """The lines at the head: a word and what is true."""
        capture, labels = self.capture, self.capture.labels
        generated = int(labels.generated.sum())
        phases = f"{len(labels) - generated} of prompts, {generated} of what was generated after them"
        receipt = capture.receipt
        counted = f"{receipt.selected} rows selected, {receipt.computed} computed, {receipt.reused} reused"
        lines = [
            ("file", f"{self.path}, {self.kind}, {size(self.path.stat().st_size)}"),
            ("model", f"{capture.model_ref or 'not said'}  {capture.model_fingerprint[:23]}".rstrip()),
            ("prompts", str(len(capture))),
            ("rows", f"{len(labels)}: {phases}" if capture.labelled else f"{receipt.selected}, without token ids"),
            ("selected by", "no rule: every row" if capture.spec.select is None else str(capture.spec.select)),
            ("receipt", counted + (f", {receipt.overflowed} values overflowed" if receipt.overflowed else "")),
        ]
        failed = [f"prompt {sample}: {error}" for sample, error in capture.errors.items()]
        return lines + [("failed", line) for line in failed]

    def print(self) -> None:
        """The file in words and tables, to stdout."""
        for word, text in self.about():
            typer.echo(f"{word + ':':<13}{text}")
        norms = _norms(self.capture)
        rows = [
            [one.site, str(one.layer), f"{one.rows} × {one.width}", one.dtype, number(one.median), number(one.max)]
            for one in norms
        ]
        print_table(["site", "layer", "rows × width", "dtype", "median norm", "max norm"], rows)
        from midstream.web.tokens import visible

        for sample in _first_samples(self.capture):
            tokens = [visible(one["text"]) if one["text"] is not None else str(one["id"]) for one in sample["tokens"]]
            more = f" … and {sample['rows'] - len(tokens)} more" if sample["rows"] > len(tokens) else ""
            typer.echo(f"prompt {sample['sample']}, {counted(sample['rows'], 'row')}:  {' | '.join(tokens)}{more}")
        if len(self.capture) > _SAMPLES:
            typer.echo(f"… and {counted(len(self.capture) - _SAMPLES, 'more prompt')}")

    def as_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        capture = self.capture
        sites = {
            site: {layer: asdict(layout) for layer, layout in layers.items() if (site, layer) in capture.tensors}
            for site, layers in capture.layouts.items()
        }
        return {
            "file": str(self.path),
            "kind": self.kind,
            "bytes": self.path.stat().st_size,
            "model": capture.model_ref,
            "model_fingerprint": capture.model_fingerprint,
            "prompts": len(capture),
            "rows": len(capture.labels) if capture.labelled else capture.receipt.selected,
            "generated_rows": int(capture.labels.generated.sum()),
            "spec": capture.spec.canonical(),
            "receipt": asdict(capture.receipt),
            "errors": {sample: str(error) for sample, error in capture.errors.items()},
            "sites": sites,
            "norms": [asdict(one) for one in _norms(capture)],
            "first_prompts": _first_samples(capture),
        }


def _read(path: Path, layer_ids: Sequence[int] | None) -> _Held:
    """A file of either kind; FileFormatError names it when it is neither."""
    from midstream.formats import capture_file, hidden_states_file
    from midstream.formats.tensor_file import opened

    with opened(path, "a capture file or a hidden-states file") as file:
        names = set(file.keys())
    if "hidden_states" in names and "labels.sample" not in names:
        content = hidden_states_file.read(path)
        return _Held(path, "a hidden-states file of vLLM's form", hidden_states_file.as_capture(content, layer_ids))
    if layer_ids is not None:
        from midstream.core.errors import spec_error

        raise spec_error("E_BAD_PARAM", "layer_ids", f"{path} is a capture file, which says its layers: leave it out")
    return _Held(path, "a capture file", capture_file.load(path))


def _narrowed(capture: CaptureResult, layers: Sequence[int] | None, sites: Sequence[str] | None) -> CaptureResult:
    """The capture with only some layers and sites; E_LAYER_RANGE and E_SITE name what there is."""
    from midstream.core.errors import choices, spec_error
    from midstream.core.sites import layer_set

    for site in sites or ():
        if site not in capture.sites:
            raise spec_error("E_SITE", "--site", f"no {site} in this file; it has: {choices(capture.sites)}")
    kept = layer_set(layers, capture.layer_ids, "--layer", "this file")
    tensors = {
        (site, layer): tensor
        for (site, layer), tensor in capture.tensors.items()
        if layer in kept and (sites is None or site in sites)
    }
    layouts = {site: layout for site, layout in capture.layouts.items() if sites is None or site in sites}
    return replace(capture, tensors=tensors, layouts=layouts)


@dataclass(frozen=True)
class _Norms:
    """One tensor of the file: its shape, and the median and the largest norm of its rows."""

    site: str
    layer: int
    rows: int
    width: int
    dtype: str
    median: float
    max: float


def _norms(capture: CaptureResult) -> list[_Norms]:
    from midstream.web.picture import median, row_norms

    found: list[_Norms] = []
    for site in capture.sites:
        for layer, norms in row_norms(capture, site).items():
            tensor = capture.tensors[site, layer]
            dtype = str(tensor.dtype).removeprefix("torch.")
            largest = float(norms.max()) if len(norms) else float("nan")
            rows, width = tensor.shape
            found.append(_Norms(site, layer, rows, width, dtype, median(norms), largest))
    return found


def _first_samples(capture: CaptureResult) -> list[dict[str, Any]]:
    """The first tokens of the first prompts, with positions and ids."""
    found: list[dict[str, Any]] = []
    for sample in range(min(_SAMPLES, len(capture))):
        if sample in capture.errors or not capture.labelled:
            continue
        tokens = capture.tokens(sample)
        shown = [{"position": one.position, "id": one.token_id, "text": one.text} for one in tokens[:_TOKENS]]
        found.append({"sample": sample, "rows": len(tokens), "tokens": shown})
    return found


def _write_page(capture: CaptureResult, path: Path) -> None:
    from midstream.formats.atomic import replacing
    from midstream.web import heatmap_html

    page = heatmap_html(capture)
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    say(f"wrote {path}: open it in a browser")
