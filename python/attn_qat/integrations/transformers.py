"""Hugging Face transformers: attn-qat as an `attn_implementation`.

    from attn_qat.integrations.transformers import register
    register()
    model = LlamaForCausalLM.from_pretrained(path, attn_implementation="attn_qat", dtype=torch.bfloat16)

Two registrations: the attention function, and the function that makes its masks. Without the second,
transformers would pass no mask at all, also for padded batches.
"""

from __future__ import annotations

import functools
import inspect
import sys

import torch
from torch import Tensor, nn

from ..recipe import Recipe
from . import missing, sdpa

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise missing("transformers", "transformers>=5.10,<6") from error

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if "q_offset" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError("transformers.masking_utils.sdpa_mask takes no q_offset")
except ImportError as error:
    raise ImportError(
        f"attn_qat.integrations.transformers: transformers {transformers.__version__} has another attention "
        "registry, takes that of transformers 5.10 to 5.24",
        name="transformers",
    ) from error

# Arguments of some models' attention that change its result.
_REFUSED = {
    "softcap": "a cap on the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias on the scores",
    "head_mask": "a factor for each head",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of keys for each query",
    "output_attentions": "the probabilities, which are never stored",
}


def register(name: str = "attn_qat", recipe: str | Recipe = Recipe.FP4) -> str:
    """Makes `name` an attn_implementation of transformers that computes with `recipe`; returns the name.

    Process-wide, but only models that ask for the name use it: register two names for two recipes. Raises
    ValueError if the name stands for something else already.
    """
    recipe = Recipe(recipe)
    # Read from the private mapping: looking a hub-like name up elsewhere may download it.
    found = AttentionInterface._global_mapping.get(name)
    if found is not None and getattr(found, "keywords", None) != {"recipe": recipe}:
        raise ValueError(
            f"attn_qat: attn_implementation '{name}' is registered already as {_describe(found)}, "
            f"takes another name for recipe {recipe}"
        )
    if found is None:
        AttentionMaskInterface.register(name, attention_mask)
        AttentionInterface.register(name, functools.partial(attention_forward, recipe=recipe))
    return name


def _describe(function) -> str:
    recipe = getattr(function, "keywords", {}).get("recipe")
    return getattr(function, "__name__", repr(function)) if recipe is None else f"recipe {recipe}"


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    recipe: str | Recipe = Recipe.FP4,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention function.

    query: (B, Hq, Sq, D). key, value: (B, Hkv, Skv, D). Returns (B, Sq, Hq, D) and no probabilities.
    Without a mask attention is causal, aligned bottom-right, if `is_causal` or else `module.is_causal` says
    so. Raises ValueError for a mask, dropout, and whatever else attn-qat does not compute.
    """
    where = f"attn_qat in {type(module).__name__}"
    for argument, meaning in _REFUSED.items():
        if kwargs.get(argument) is not None and kwargs[argument] is not False:
            raise ValueError(f"{where}: {argument} is given ({meaning}), takes None")
    if attention_mask is not None:
        raise ValueError(
            f"{where}: attention_mask has shape {tuple(attention_mask.shape)}, takes None: attention is full "
            "or causal. transformers makes a mask for padding, packed sequences, sliding windows, static "
            "caches, and when it traces with an attention_mask given or without a cache (use_cache=False, "
            "also by gradient checkpointing)"
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    reason = sdpa.why_not(query, key, value, dropout_p=dropout, enable_gqa=True)
    if reason is not None:
        hint = "; set the model's attention dropout to 0" if dropout else ""
        raise ValueError(f"{where}: {reason}{hint}")
    out = sdpa.attend(query, key, value, bool(is_causal), scaling, recipe)
    return out.transpose(1, 2), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config=None,
    **kwargs,
) -> Tensor | None:
    """transformers' mask function: None where attention is full, or causal and aligned bottom-right.

    Other masks are those of `sdpa`. When there is one differs: `sdpa` makes one for queries that follow
    cached keys, none for an empty static cache (causal, top-left), and decides otherwise under torch.compile.
    Raises ValueError for models that make their masks here and then run attention of their own, which would
    see no mask at all.
    """
    reason = _why_not_asked(type(config))
    if reason is not None:
        raise ValueError(f"attn_qat in transformers: {reason}")
    # A window or a first chunk as long as the keys hides none of them.
    unmasked = local_size is None or kv_length < local_size + (kv_offset == 0)
    if unmasked and _hides_nothing(attention_mask, kv_offset + kv_length):
        if allow_is_bidirectional_skip:
            return None
        # A static cache has a tensor here, and keys beyond the last query.
        last_sees_all = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
        if allow_is_causal_skip and last_sees_all:
            return None
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        config=config,
        **kwargs,
    )


@torch.compiler.assume_constant_result  # it reads source text
def _why_not_asked(config_class: type) -> str | None:
    return _find_why_not_asked(config_class)


@functools.cache
def _find_why_not_asked(config_class: type) -> str | None:
    """Why models of this configuration would not call `attention_forward`; None if they would, or are unknown.

    transformers takes any registered name for them, and leaves it at that.
    """
    home = sys.modules.get(config_class.__module__.replace(".configuration_", ".modeling_"))
    for model in vars(home).values() if home else ():
        if isinstance(model, type) and issubclass(model, transformers.PreTrainedModel):
            uses_interface = getattr(model, "_can_set_attn_implementation", None)
            if model.__module__ == home.__name__ and uses_interface is not None and not uses_interface():
                return (
                    f"models of {config_class.__name__} run attention of their own whatever "
                    "attn_implementation says, takes models built on AttentionInterface"
                )
    return None


def _hides_nothing(padding_mask: Tensor | None, length: int) -> bool:
    """Whether the mask (B, length) is true throughout; False while values are traced and cannot be read."""
    if padding_mask is None:
        return True
    return not torch.compiler.is_compiling() and padding_mask.shape[-1] == length and bool(padding_mask.all())
