"""CaptureResult: one label table, one tensor per site and layer, and the ways to look at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .capture import CaptureReceipt, CaptureSpec, Labels
from .errors import CaptureError, MidstreamError, choices, spec_error
from .generation import Completion
from .sites import Site, SiteLayout

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor


@dataclass(frozen=True)
class TokenRow:
    """One selected row of a sample: where it is, which token it consumed, and that token's text."""

    position: int
    token_id: int
    text: str | None
    choice: int


@dataclass(frozen=True, eq=False, repr=False)
class CaptureResult:
    """The rows of one capture call.

    labels: one label per row, for all sites and layers. tensors: `(site, layer)` → `[rows, width]`, on the CPU,
    ordinary tensors that own their memory. layouts: `[site][layer]` → SiteLayout. outputs: one Completion per
    prompt, in order. errors: sample → the error of a request that failed; the others stay readable. steering: what was
    done to each sample's rows, as `InterventionSpec.described`, or None; empty where nothing was steered.
    """

    labels: Labels
    tensors: Mapping[tuple[Site, int], Tensor]
    layouts: Mapping[Site, Mapping[int, SiteLayout]]
    outputs: Sequence[Completion]
    receipt: CaptureReceipt
    spec: CaptureSpec
    model_ref: str = ""
    model_fingerprint: str = ""
    errors: Mapping[int, MidstreamError] = field(default_factory=dict[int, MidstreamError])
    decode: Callable[[Sequence[int]], list[str]] | None = None
    """Token ids → the text of each; None without a tokenizer."""
    steering: Sequence[Mapping[str, Any] | None] = ()

    def __post_init__(self) -> None:
        sites = list(self.layouts)
        ordered = sorted(self.tensors, key=lambda key: (sites.index(key[0]), key[1]))
        object.__setattr__(self, "tensors", {key: self.tensors[key] for key in ordered})

    # --- what is there

    @property
    def sites(self) -> tuple[Site, ...]:
        """The captured sites, in the order in which they were asked."""
        return tuple(self.layouts)

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Every layer that a site was captured at, ascending; none when no row was selected."""
        return tuple(sorted({layer for _, layer in self.tensors}))

    @property
    def labelled(self) -> bool:
        """Whether each row has its label (false only for files that others wrote without token ids)."""
        return all(len(tensor) == len(self.labels) for tensor in self.tensors.values())

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self.outputs)

    def _site(self, site: str | None) -> Site:
        if site is None and len(self.sites) == 1:
            return self.sites[0]
        if site in self.sites:
            return site  # pyright: ignore[reportReturnType]
        asked = "which site?" if site is None else f"no site {site!r}"
        raise spec_error("E_SITE", "site", f"{asked} This capture has: {choices(self.sites)}")

    def _sample_rows(self, sample: int) -> slice:
        """The place of a sample's rows in every tensor: contiguous, since labels are ordered by sample."""
        if not 0 <= sample < len(self.outputs):
            raise IndexError(f"no sample {sample}; there are {len(self.outputs)}")
        if sample in self.errors:
            raise self.errors[sample]
        if not self.labelled:
            raise CaptureError("these rows have no labels: no row can be said to be a sample's")
        start, stop = np.searchsorted(self.labels.sample, [sample, sample + 1])
        return slice(int(start), int(stop))

    def _raise_first_error(self) -> None:
        """Shapes over all samples would pass a failed one off as empty."""
        if self.errors:
            raise self.errors[min(self.errors)]
        if not self.labelled:
            raise CaptureError("these rows have no labels: no row can be said to be a sample's")

    # --- rows

    def rows(self, layer: int, site: str | None = None) -> Tensor:
        """All rows of one layer, `[rows, width]`, in the order of `labels`."""
        name = self._site(site)
        if (name, layer) not in self.tensors:
            have = [had for of, had in self.tensors if of == name]
            raise spec_error("E_LAYER_RANGE", "layer", f"layer {layer!r} was not captured; there are: {have}")
        return self.tensors[name, layer]

    def sample(self, index: int, site: str | None = None) -> dict[int, Tensor]:
        """The rows of one prompt: layer → `[its rows, width]` (`[0, width]` when it has none)."""
        name, rows = self._site(site), self._sample_rows(index)
        return {layer: tensor[rows] for (of, layer), tensor in self.tensors.items() if of == name}

    def sample_positions(self, index: int) -> NDArray[np.int64]:
        """Absolute positions of a prompt's rows, `[its rows]`."""
        return self.labels.position[self._sample_rows(index)]

    def sample_token_ids(self, index: int) -> NDArray[np.int64]:
        """Token ids that a prompt's rows consumed, `[its rows]`."""
        return self.labels.token_id[self._sample_rows(index)]

    def tokens(self, index: int) -> list[TokenRow]:
        """A prompt's selected rows with position, id, and (with a tokenizer) text."""
        rows = self._sample_rows(index)
        ids: list[int] = self.labels.token_id[rows].tolist()
        texts: Sequence[str | None] = self.decode(ids) if self.decode else [None] * len(ids)
        places = zip(self.labels.position[rows].tolist(), ids, texts, self.labels.choice[rows].tolist(), strict=True)
        return [TokenRow(*place) for place in places]

    def meta(self, layer: int) -> dict[str, NDArray[np.int64]]:
        """`req_ids`, `positions` and `token_ids` of a layer's rows (EasySteer's form), each `[rows]`."""
        if layer not in self.layer_ids:
            raise spec_error("E_LAYER_RANGE", "layer", f"layer {layer!r} was not captured; there are: {self.layer_ids}")
        return {
            "req_ids": self.labels.sample,
            "positions": self.labels.position,
            "token_ids": self.labels.token_id,
        }

    # --- other shapes

    def padded(self, layer: int, site: str | None = None) -> tuple[Tensor, Tensor]:
        """`([samples, longest, width], mask [samples, longest])`; zero where the mask is false."""
        import torch

        self._raise_first_error()
        rows = self.rows(layer, site)
        counts = torch.as_tensor(np.bincount(self.labels.sample, minlength=len(self.outputs)))
        longest = int(counts.max()) if len(counts) else 0
        mask = torch.arange(longest)[None, :] < counts[:, None]
        out = rows.new_zeros((len(self.outputs), longest, rows.shape[1]))
        out[mask] = rows
        return out, mask

    def last(self, layer: int, site: str | None = None) -> Tensor:
        """The last row of each sample, `[samples, width]`; refused when a sample has none, or several choices."""
        self._raise_first_error()
        if (self.labels.choice > 0).any():
            raise CaptureError("with several choices a sample has several last rows: take them from sample(i)")
        rows = self.rows(layer, site)
        stops = np.searchsorted(self.labels.sample, np.arange(len(self.outputs)), side="right")
        counts = np.bincount(self.labels.sample, minlength=len(self.outputs))
        if not counts.all():
            empty = int(np.flatnonzero(counts == 0)[0])
            raise CaptureError(f"sample {empty} has no row: its selection is empty")
        return rows[np.asarray(stops - 1)]

    def to_nested(self, site: str | None = None) -> list[list[Tensor]]:
        """`[sample][layer place]` → `[its rows, width]`, layers ascending."""
        name = self._site(site)
        return [list(self.sample(index, name).values()) for index in range(len(self.outputs))]

    def numpy(self) -> dict[str, NDArray[Any]]:
        """`"<site>.<layer>"` → array `[rows, width]`; bfloat16, which NumPy has not, becomes float32 (exact)."""
        import torch

        return {
            f"{site}.{layer}": (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for (site, layer), tensor in self.tensors.items()
        }

    def to_frame(self) -> pd.DataFrame:
        """A pandas frame: label columns, the token's text, and one column of row vectors per site and layer."""
        import pandas as pd

        labels = self.labels
        columns: dict[str, Any] = {
            "sample": labels.sample,
            "choice": labels.choice,
            "position": labels.position,
            "token_id": labels.token_id,
            "phase": labels.phase,
        }
        if self.decode:
            columns["token"] = self.decode(labels.token_id.tolist())
        return pd.DataFrame(columns | {name: list(array) for name, array in self.numpy().items()})

    # --- files: formats/ uses core, so these three reach up for it only when they are called

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the capture file (docs/formats.md): to a temporary name, flushed, renamed."""
        from midstream.formats import capture_file

        return capture_file.save(self, path)

    @staticmethod
    def load(path: str | PathLike[str]) -> CaptureResult:
        """Read a capture file; FileFormatError says what is wrong with one that is none."""
        from midstream.formats import capture_file

        return capture_file.load(path)

    def save_hidden_states(self, directory: str | PathLike[str]) -> list[Path]:
        """Write vLLM's hidden-states files, one per sample, for draft-model training."""
        from midstream.formats import hidden_states_file

        return hidden_states_file.save_capture(self, directory)

    # --- to look at

    def __repr__(self) -> str:
        lines = [f"CaptureResult of {len(self.outputs)} prompts, {len(self.labels)} rows"]
        for site in self.sites:
            layers = [layer for of, layer in self.tensors if of == site]
            if layers:
                first = self.tensors[site, layers[0]]
                dtype = str(first.dtype).removeprefix("torch.")
                lines.append(f"  {site}: layers {_ranges(layers)}, width {first.shape[1]}, {dtype}")
        if steered := [sample for sample, of in enumerate(self.steering) if of]:
            lines.append(f"  steered: samples {_ranges(steered)}")
        if self.errors:
            lines.append(f"  failed: samples {_ranges(sorted(self.errors))}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The first samples as a table: rows, the norm of each layer's last row, and the selected tokens."""
        head, *rest = repr(self).splitlines()
        site = self.sites[0] if self.sites else None
        layers = [layer for of, layer in self.tensors if of == site]
        layers = layers[:: -(-len(layers) // _HTML_LAYERS) or 1]
        titles = ["sample", "rows", *(f"norm at {layer}" for layer in layers), "tokens"]
        body: list[str] = []
        for index in [i for i in range(len(self.outputs)) if i not in self.errors][:_HTML_SAMPLES]:
            texts = [row.text if row.text is not None else str(row.token_id) for row in self.tokens(index)]
            shown = ("" if self.decode else " ").join(texts)[:120]
            sample = self.sample(index, site) if layers else {}
            norms = [float(np.linalg.norm(sample[layer][-1:].float().numpy())) for layer in layers]
            cells = [str(index), str(len(texts)), *(f"{norm:.0f}" for norm in norms), shown]
            body.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
        return (
            f"<b>{escape(head)}</b><pre>{escape(chr(10).join(rest))}</pre><table>"
            f"<tr>{''.join(f'<th>{title}</th>' for title in titles)}</tr>"
            f"{''.join(f'<tr>{row}</tr>' for row in body)}</table>"
        )


_HTML_LAYERS, _HTML_SAMPLES = 8, 10


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7` for `[0, 1, 2, 3, 7]`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
