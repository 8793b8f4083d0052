"""`torch.nn.functional.multi_head_attention_forward` with the attention in its middle replaced.

torch's own cannot be intercepted half-way: a function mode sees the whole function, and its inner
scaled_dot_product_attention call no more. So the part that attn-qat takes is computed here: projections,
attention without masks or weights, output projection.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass
class MultiHead:
    """The arguments of one multi_head_attention_forward call, under its own names."""

    query: Tensor  # (L, N, E), or (L, E) without a batch
    key: Tensor
    value: Tensor
    embed_dim_to_check: int
    num_heads: int
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    add_zero_attn: bool
    dropout_p: float
    out_proj_weight: Tensor
    out_proj_bias: Tensor | None
    training: bool = True
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    use_separate_proj_weight: bool = False
    q_proj_weight: Tensor | None = None
    k_proj_weight: Tensor | None = None
    v_proj_weight: Tensor | None = None
    static_k: Tensor | None = None
    static_v: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False

    def why_not(self) -> str | None:
        """Why `forward` does not compute this call; None if it does."""
        if self.need_weights:
            return "need_weights is True, takes False: the probabilities are never stored"
        if self.key_padding_mask is not None:
            return "key_padding_mask is given, takes None"
        if self.attn_mask is not None and not self.is_causal:
            return "attn_mask is given without is_causal=True, takes None or a causal mask said to be one"
        if self.attn_mask is None and self.is_causal:
            return "is_causal is True without attn_mask, takes both: torch asks for the mask"
        if self.training and self.dropout_p != 0.0:
            return f"dropout is {self.dropout_p} in training, takes 0"
        if self.bias_k is not None or self.bias_v is not None or self.add_zero_attn:
            return "add_bias_kv or add_zero_attn is set, takes neither"
        if self.static_k is not None or self.static_v is not None:
            return "static_k or static_v is given, takes None"
        if self.query.is_nested:
            return "query is a nested tensor, takes a strided one"
        if self.query.dim() not in (2, 3) or self.query.shape[-1] != self.embed_dim_to_check:
            return f"query has shape {tuple(self.query.shape)}, takes (L, N, E) or (L, E)"
        return None

    def forward(self, attend: Callable[..., Tensor]) -> tuple[Tensor, None]:
        """attend(q, k, v, is_causal=...) between the projections; the output in query's shape, no weights."""
        batched = self.query.dim() == 3
        q, k, v = (self._split(x if batched else x.unsqueeze(1)) for x in self._project())
        out = attend(q, k, v, is_causal=self.is_causal)
        out = out.permute(2, 0, 1, 3).flatten(2)  # (N, H, L, D) -> (L, N, E)
        out = F.linear(out, self.out_proj_weight, self.out_proj_bias)
        return (out if batched else out.squeeze(1)), None

    def _project(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, bias = self.query, self.key, self.value, self.in_proj_bias
        if self.use_separate_proj_weight:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        elif q is k and k is v:
            return F.linear(q, self.in_proj_weight, bias).chunk(3, dim=-1)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return tuple(F.linear(x, weight, b) for x, weight, b in zip((q, k, v), weights, biases, strict=True))

    def _split(self, x: Tensor) -> Tensor:
        """(L, N, E) -> (N, H, L, D), a view."""
        return x.unflatten(2, (self.num_heads, -1)).permute(1, 2, 0, 3)
