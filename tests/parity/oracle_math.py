"""The arithmetic of decoder blocks in float64, written out: no module of transformers is called here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]


def wide(tensor: Tensor) -> Tensor:
    """The values in float64, so that what is compared with a float32 model has no error of its own."""
    return tensor.detach().double()


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    return x * torch.sigmoid(x)


def gelu(x: Tensor) -> Tensor:
    """The exact GELU."""
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation (gelu_new, gelu_pytorch_tanh, Bloom's own)."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def embed(ids: Sequence[int], table: nn.Module) -> Tensor:
    """Rows of an embedding table, without the factor that some tables apply."""
    weight: Any = table.weight
    return wide(weight[torch.tensor(ids)])


def linear(x: Tensor, module: nn.Module) -> Tensor:
    """x W^T + b; a GPT-2 Conv1D keeps W transposed."""
    weight: Any = module.weight
    matrix = wide(weight) if type(module).__name__ == "Conv1D" else wide(weight).T
    bias: Any = getattr(module, "bias", None)
    return x @ matrix if bias is None else x @ matrix + wide(bias)


def rms(x: Tensor, norm: Any, plus_one: bool = False) -> Tensor:
    """RMS norm; with `plus_one` the stored weight is the deviation from one."""
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return rms_weight(x, wide(norm.weight) + (1 if plus_one else 0), eps)


def rms_weight(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    """RMS norm with the weight given."""
    return weight * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def layer_norm(x: Tensor, norm: Any) -> Tensor:
    """Layer norm, with or without a bias."""
    eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * wide(norm.weight)
    bias = getattr(norm, "bias", None)
    return scaled if bias is None else scaled + wide(bias)


def gated(x: Tensor, mlp: Any, act: Activation) -> Tensor:
    """down(act(gate(x)) · up(x)) of separate projections."""
    return linear(act(linear(x, mlp.gate_proj)) * linear(x, mlp.up_proj), mlp.down_proj)


def gated_fused(x: Tensor, mlp: Any, act: Activation) -> Tensor:
    """The same where one matrix holds first the gate and then up."""
    gate, up = linear(x, mlp.gate_up_proj).chunk(2, dim=-1)
    return linear(act(gate) * up, mlp.down_proj)


def two_layer(x: Tensor, inner: nn.Module, outer: nn.Module, act: Activation) -> Tensor:
    """outer(act(inner(x)))."""
    return linear(act(linear(x, inner)), outer)


def experts(x: Tensor, module: Any, chosen: Tensor, weights: Tensor, act: Activation) -> Tensor:
    """Sum over each row's chosen experts of weight · gated MLP, expert by expert and row by row."""
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            gate, up = (x[row] @ wide(module.gate_up_proj[expert]).T).chunk(2)
            out[row] += weight * (wide(module.down_proj[expert]) @ (act(gate) * up))
    return out


def heads(x: Tensor, size: int) -> Tensor:
    """[tokens, heads · size] as [tokens, heads, size]."""
    return x.view(x.shape[0], -1, size)


def project(x: Tensor, attn: Any, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of separate projections, by head."""
    return (
        heads(linear(x, attn.q_proj), size),
        heads(linear(x, attn.k_proj), size),
        heads(linear(x, attn.v_proj), size),
    )


def angles(tokens: int, dims: int, theta: float) -> Tensor:
    """Rotation angles [tokens, dims / 2] of positions 0, 1, …

    In float32, because a model's rotary table is: at position 200 the rounding of the angle alone is 1e-5,
    and belongs to what the model computes.
    """
    frequencies = 1.0 / (theta ** (torch.arange(0, dims, 2, dtype=torch.float) / dims))
    return torch.arange(tokens, dtype=torch.float)[:, None] * frequencies


def rotate_halves(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate dimension i with i + dims/2 of each head; dimensions beyond `dims` pass."""
    half = angle.shape[-1]
    cos, sin = wide(angle.cos())[:, None], wide(angle.sin())[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def rotate_pairs(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate dimension 2i with 2i + 1 of each head; dimensions beyond `dims` pass."""
    dims = 2 * angle.shape[-1]
    cos, sin = wide(angle.cos())[:, None], wide(angle.sin())[:, None]
    first, second = x[..., :dims:2], x[..., 1:dims:2]
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned.flatten(-2), x[..., dims:]], dim=-1)


def causal(tokens: int, window: int | None = None, chunk: int | None = None) -> Tensor:
    """What a row may see: itself and before, in a window that counts the row itself, or in its chunk."""
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    seen = column <= row
    if window is not None:
        seen = seen & (row - column < window)
    if chunk is not None:
        seen = seen & (row // chunk == column // chunk)
    return seen


def alibi(tokens: int, slopes: Tensor) -> Tensor:
    """Bias [heads, 1, tokens] that grows with the key's position (a constant per row does not matter)."""
    return wide(slopes)[:, None, None] * torch.arange(tokens, dtype=torch.double)


@dataclass
class Trace:
    """What one prompt gives at every site, the attention patterns of q and k, and the logits."""

    sites: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    patterns: dict[int, Tensor] = field(default_factory=dict)
    logits: Tensor | None = None

    def put(self, layer: int, **values: Tensor) -> None:
        """Record rows at sites of a layer."""
        for site, value in values.items():
            self.sites[site, layer] = value.reshape(value.shape[0], -1)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        seen: Tensor,
        *,
        cap: float | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """Record q, k and head_out of a layer and give head_out, [tokens, heads · value size].

        `gate` multiplies the heads before the output projection, and head_out is what that projection reads.
        """
        groups = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~seen, -math.inf)
        if sinks is not None:
            column = wide(sinks)[:, None, None].expand(-1, scores.shape[1], 1)
            pattern = F.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
        else:
            pattern = F.softmax(scores, dim=-1)
        out = torch.einsum("hqk,khd->qhd", pattern, values).flatten(1)
        out = out if gate is None else out * gate
        self.patterns[layer] = pattern
        self.put(layer, q=q, k=k, head_out=out)
        return out

    def block(self, layer: int, pre: Tensor, attn: Tensor, mlp: Tensor) -> Tensor:
        """Record a block that adds both sublayers to the stream, and give the stream after it."""
        post = pre + attn + mlp
        self.put(layer, resid_pre=pre, attn_out=attn, mlp_out=mlp, resid_post=post)
        return post

    def head(self, final: Tensor, module: nn.Module, scale: float = 1.0, cap: float | None = None) -> None:
        """Record the logits of a normed stream."""
        logits = linear(final, module) * scale
        self.logits = logits if cap is None else cap * torch.tanh(logits / cap)
