"""Choosing modules of a model by name, pattern or predicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

import torch
from torch import nn

Modules = str | Iterable[str] | Callable[[str, nn.Module], bool]


def called(name: str) -> str:
    """How an error calls the module of this name."""
    return f"'{name}'" if name else "the model itself"


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """name -> module, parents first, named as if torch.compile had wrapped no part of the model.

    A module that is held twice has two names.
    """
    return dict(_walk(model, "", ()))


def _walk(module: nn.Module, name: str, parents: tuple[nn.Module, ...]):
    wraps = isinstance(module, torch._dynamo.OptimizedModule)
    if not wraps:
        yield name, module
    for part, child in module._modules.items():
        if child is not None and not any(child is parent for parent in (*parents, module)):
            below = name if wraps and part == "_orig_mod" else f"{name}.{part}" if name else part
            yield from _walk(child, below, (*parents, module))


def below(name: str, roots: Iterable[str]) -> bool:
    """Whether name is one of roots or lies in one."""
    return any(root in ("", name) or name.startswith(root + ".") for root in roots)


def check_one_choice(named: dict[str, nn.Module], chosen: list[str], excluded: list[str], where: str) -> None:
    """Raises ValueError for a module that is chosen by one of its names and excluded by another."""
    wanted = {
        id(module): name
        for name, module in named.items()
        if below(name, chosen) and not below(name, excluded)
    }
    for name, module in named.items():
        if below(name, excluded) and id(module) in wanted:
            raise ValueError(
                f"{where}: {called(wanted[id(module)])} is the same module as {called(name)}, which exclude "
                "names, takes one choice for one module"
            )


def choose(named: dict[str, nn.Module], modules: Modules, argument: str) -> list[str]:
    """Names of the modules that `modules` is about, without those inside another one of them.

    Raises ValueError for a name or pattern without a module; `argument` is what the error calls `modules`.
    """
    holds = modules if callable(modules) else _predicate(named, modules, argument)
    found: list[str] = []
    for name, module in named.items():
        if not below(name, found) and holds(name, module):
            found.append(name)
    return found


def _predicate(named: dict[str, nn.Module], modules: str | Iterable[str], argument: str):
    patterns = [modules] if isinstance(modules, str) else list(modules)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(
                f"{argument} holds {pattern!r}, takes names, patterns or a predicate(name, module)"
            )
        if not any(fnmatchcase(name, pattern) for name in named):
            some = ", ".join(list(named)[1:9])
            raise ValueError(
                f"{argument} holds '{pattern}', which matches no module of the model: {some} ..."
            )
    return lambda name, _: any(fnmatchcase(name, pattern) for pattern in patterns)
