"""`Attention`: the recipe of an attention layer as a module."""

from __future__ import annotations

from torch import Tensor, nn

from .autograd import attention
from .recipe import Recipe


class Attention(nn.Module):
    """Calls `attn_qat.attention` with fixed options; has no parameters.

    Replace a scaled_dot_product_attention call with one of these to train a layer for FP4.
    """

    def __init__(
        self,
        *,
        recipe: str | Recipe = Recipe.FP4,
        is_causal: bool = False,
        softmax_scale: float | None = None,
        deterministic: bool = True,
    ):
        super().__init__()
        self.recipe = Recipe(recipe)
        self.is_causal = is_causal
        self.softmax_scale = softmax_scale
        self.deterministic = deterministic

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q: (B, Hq, Sq, D), k and v: (B, Hkv, Skv, D) -> (B, Hq, Sq, D)."""
        return attention(
            q,
            k,
            v,
            is_causal=self.is_causal,
            softmax_scale=self.softmax_scale,
            recipe=self.recipe,
            deterministic=self.deterministic,
        )

    def extra_repr(self) -> str:
        return f"recipe={self.recipe}, is_causal={self.is_causal}, softmax_scale={self.softmax_scale}"
