"""Hugging Face diffusers: attn-qat as an attention backend.

    from attn_qat.integrations.diffusers import register, set_attention
    register()
    set_attention(transformer, modules="blocks.*.attn1")

diffusers has no public way to add a backend: its names are a closed enumeration. This adds a member.
"""

from __future__ import annotations

import copy
import functools
import inspect

from torch import Tensor, nn

from ..recipe import Recipe
from . import missing, sdpa
from .modules import Modules, below, called, check_one_choice, choose, named_modules

try:
    import diffusers
except ModuleNotFoundError as error:
    if error.name != "diffusers":
        raise
    raise missing("diffusers", "diffusers>=0.42,<1") from error

try:
    from diffusers.models.attention import AttentionModuleMixin
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
    from diffusers.models.attention_processor import Attention

    _TABLES = ("_member_map_", "_value2member_map_", "_member_names_")
    _ENUM = [getattr(AttentionBackendName, table) for table in _TABLES]
    _arguments = list(inspect.signature(_AttentionBackendRegistry.register).parameters)
    if _arguments[:2] != ["backend", "constraints"]:
        raise ImportError("the registry's register() takes other arguments")
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"attn_qat.integrations.diffusers: diffusers {diffusers.__version__} has another attention registry, "
        "takes that of diffusers 0.42",
        name="diffusers",
    ) from error


def register(name: str = "attn_qat", recipe: str | Recipe = Recipe.FP4) -> str:
    """Adds the backend `name`, which computes attention with `recipe`, to diffusers; returns the name.

    Process-wide, but used only where the name is chosen. Raises ValueError if the name is taken already.
    """
    recipe = Recipe(recipe)
    if name != name.lower():
        raise ValueError(f"attn_qat: backend name is '{name}', takes lower case: diffusers looks names up so")
    members, by_value, names = _ENUM
    found = _AttentionBackendRegistry._backends.get(by_value.get(name))
    if found is not None and getattr(found, "keywords", None) == {"recipe": recipe}:
        return name
    if name in by_value:
        raise ValueError(
            f"attn_qat: diffusers has a backend '{name}' already, takes another name for recipe {recipe}"
        )
    member = str.__new__(AttentionBackendName, name)
    member._name_, member._value_ = name.upper(), name
    members[name.upper()] = by_value[name] = member
    names.append(name.upper())
    _AttentionBackendRegistry.register(member, constraints=[])(functools.partial(_backend, recipe=recipe))
    return name


def _backend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config=None,
    *,
    recipe: Recipe,
) -> Tensor:
    """query: (B, Sq, Hq, D), key, value: (B, Skv, Hkv, D) -> (B, Sq, Hq, D)."""
    if return_lse or _parallel_config is not None:
        raise ValueError(
            "attn_qat in diffusers: context parallelism is on, takes attention of whole sequences"
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    reason = sdpa.why_not(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if reason is not None:
        raise ValueError(f"attn_qat in diffusers: {reason}")
    return sdpa.attend(q, k, v, is_causal, scale, recipe).transpose(1, 2)


def set_attention(
    model: nn.Module, name: str = "attn_qat", *, modules: Modules | None = None, exclude: Modules = ()
) -> list[str]:
    """Gives the attention modules of `model` the backend `name`; returns their names.

    Reaches this model alone. `model.set_attention_backend(name)` also makes the backend the default of the
    process, for every model that has none set: a teacher beside a student would follow.

    modules, exclude: names, patterns or a predicate, as in `attn_qat.convert`; a module brings what lies
    below it. Raises ValueError if none is chosen, or one has a processor that does not ask for a backend
    (`attn_qat.convert` takes such models).
    """
    by_value = _ENUM[1]
    if name not in by_value:
        raise ValueError(f"attn_qat: name is '{name}', takes a registered backend: {', '.join(by_value)}")
    named = named_modules(model)
    chosen = choose(named, "" if modules is None else modules, "attn_qat: modules")
    excluded = choose(named, exclude, "attn_qat: exclude")
    check_one_choice(named, chosen, excluded, "attn_qat")
    found = {
        path: module
        for path, module in named.items()
        if isinstance(module, (Attention, AttentionModuleMixin))
        and below(path, chosen)
        and not below(path, excluded)
    }
    if not found:
        raise ValueError("attn_qat: modules chooses no attention module of diffusers, takes some")
    for path, module in found.items():
        if not hasattr(module.processor, "_attention_backend"):
            raise ValueError(
                f"attn_qat: {called(path)} has a {type(module.processor).__name__}, which asks for no "
                "backend, takes one that does; use attn_qat.convert for this model"
            )
    for module in found.values():
        processor = copy.copy(module.processor)  # which other modules, and other models, may share
        processor._attention_backend = by_value[name]
        module.set_processor(processor)
    return list(found)
