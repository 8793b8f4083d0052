"""`convert`: routes the scaled_dot_product_attention calls of chosen modules of a model through attn-qat.

A converted module keeps its parameters, its name and the behaviour of its type: its class becomes a subclass
whose forward runs inside a `TorchFunctionMode`. Modes are a stack of the running thread, so a conversion
reaches neither other models nor other threads' work. The mode is entered by the module that calls attention,
not only by the model around it, so that a recomputation in the backward (activation checkpointing) enters it
again. torch.compile guards on the type of a module, so a model compiled before is compiled anew.
"""

from __future__ import annotations

import copyreg
import functools
import threading
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .integrations import sdpa
from .integrations.modules import Modules, below, called, check_one_choice, choose, named_modules
from .integrations.multi_head import MultiHead
from .recipe import Recipe

_SDPA = torch._C._nn.scaled_dot_product_attention
_MULTI_HEAD = F.multi_head_attention_forward
# Their inference paths compute the attention of their children without calling them, unless a mode is active.
_FUSING = (nn.TransformerEncoder, nn.TransformerEncoderLayer)
_ROUTE = "_attn_qat_route"
_lock = threading.RLock()  # of conversions and their undoing; forwards take no lock


# --- Inside a converted module ------------------------------------------------------------------------------


def _pass_on(function, args, kwargs):
    """function(...) for the modes and the torch around."""
    if function is torch.Tensor.unflatten:  # by name: dynamo cannot trace the super() in it under a mode
        return args[0].unflatten(*args[1:], **kwargs)
    return function(*args, **kwargs)


def _as_it_is(function, args, kwargs):
    """function(...) out of reach of the routes of the modules around this one."""
    if function is _SDPA:
        return torch.ops.aten.scaled_dot_product_attention.default(*args, **kwargs)
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)


class _Leave(TorchFunctionMode):
    """Attention as it is: in a module excluded from a converted one, or fusing and around a converted one."""

    def __reduce__(self):
        return type(self), ()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return (_as_it_is if func in (_SDPA, _MULTI_HEAD) else _pass_on)(func, args, kwargs)


class _Route(TorchFunctionMode):
    """Attention through attn-qat. Holds no reference to its module, so that the module can be copied."""

    def __init__(self, name: str, recipe: Recipe, unsupported: str, log: dict | None = None):
        super().__init__()
        self.name, self.recipe, self.unsupported = name, recipe, unsupported
        self.log = {} if log is None else log  # name -> reasons, in order; None stands for a call replaced

    def __reduce__(self):
        return type(self), (self.name, self.recipe, self.unsupported)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _SDPA:
            return self._attend(*args, **kwargs)
        if func is not _MULTI_HEAD:
            return _pass_on(func, args, kwargs)
        call = MultiHead(*args, **kwargs)
        reason = call.why_not()
        if reason is None:
            return call.forward(self._attend)
        self._refuse(reason)
        return _as_it_is(func, args, kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        arguments = (query, key, value, attn_mask, dropout_p, is_causal)
        reason = sdpa.why_not(*arguments, scale=scale, enable_gqa=enable_gqa)
        if reason is None and self.unsupported == "leave":
            reason = sdpa.why_no_kernel(query, is_causal, self.recipe)
        if reason is None:
            self._note(None)
            return sdpa.attend(query, key, value, is_causal, scale, self.recipe)
        self._refuse(reason)
        return _as_it_is(_SDPA, arguments, {"scale": scale, "enable_gqa": enable_gqa})

    def _refuse(self, reason: str) -> None:
        if self.unsupported == "raise":
            raise ValueError(
                f"attn_qat.convert: {called(self.name)}: {reason}; exclude the module, or pass "
                "unsupported='leave' to compute such calls as they are"
            )
        self._note(reason)

    # Under torch.compile this runs while tracing (see _run_while_tracing), and compiled code knows nothing
    # of it: neither the name, a guard that would compile every layer apart, nor the log, a side effect that
    # checkpointed regions may not have.
    def _note(self, reason: str | None) -> None:
        self.log.setdefault(self.name, {})[reason] = None


@functools.cache
def _run_while_tracing() -> None:
    """Marks what torch.compile is to call, not to trace. Not at import, since torch imports dynamo for it."""
    mark = torch.compiler.assume_constant_result
    _Route._note = mark(_Route._note)
    sdpa.traced_why_no_cuda_kernel = mark(sdpa.traced_why_no_cuda_kernel)


_converted_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def _converted(cls: type) -> type:
    """The subclass of cls that runs its forward inside the module's route. There is one for each cls.

    A route of None is that of a module around the chosen ones, which is prepared for torch.compile only.
    """
    with _lock:
        found = _converted_classes.get(cls)
        if found is None:
            found = _converted_classes[cls] = _subclass(cls)
        return found


def _subclass(cls: type) -> type:
    _run_while_tracing()

    @functools.wraps(cls.forward)  # the signature is read by trainers and generation loops
    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            # dynamo lets a checkpointed region enter a mode only if one was entered before it.
            with _Leave():
                pass
        route = self._attn_qat_route
        if route is None:
            return super(converted, self).forward(*args, **kwargs)
        with route:
            return super(converted, self).forward(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        make, arguments, *rest = super(converted, self).__reduce_ex__(protocol)
        if make is not copyreg.__newobj__:
            raise TypeError(
                f"{cls.__name__} is copied and pickled in a way of its own: undo its conversion first"
            )
        return _new_converted, (cls, *arguments[1:]), *rest

    body = {"forward": forward, "__reduce_ex__": __reduce_ex__, "__doc__": cls.__doc__}
    body |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    converted = type(cls)(cls.__name__, (cls,), body)
    return converted


def _new_converted(cls: type, *arguments):
    """How copy and pickle make a converted module: importable, which the subclass is not."""
    converted = _converted(cls)
    return converted.__new__(converted, *arguments)


# --- Choosing modules ---------------------------------------------------------------------------------------


def _may_attend(module: nn.Module) -> bool:
    """Whether the module's own forward may call attention. Few of torch's own do."""
    if isinstance(module, (nn.MultiheadAttention, *_FUSING)) or "forward" in vars(module):
        return True
    home = getattr(type(module).forward, "__module__", None) or ""
    return not home.startswith("torch.") or isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule))


def _why_not_convertible(module: nn.Module) -> str | None:
    if _ROUTE in vars(module):
        return "is converted already, takes a module that is not: undo that first"
    if isinstance(module, torch.jit.ScriptModule):
        return "is a ScriptModule, whose calls torch does not show: convert before scripting"
    if isinstance(module, torch.fx.GraphModule):
        return "is a GraphModule, whose calls are in its graph: convert before tracing"
    if "forward" in vars(module):
        return (
            "has a forward of its own beside its class's, as hooks of other packages set: convert before that"
        )
    return None


# --- The conversion -----------------------------------------------------------------------------------------


class Conversion:
    """What `convert` did to a model; undoes it, at the end of a `with` block or by `undo`.

    recipe: the Recipe. modules: names of the chosen modules. See `replaced`, `left`, `unseen` once the model
    has run; print it for all of them.
    """

    def __init__(self, recipe: Recipe, modules: list[str]):
        self.recipe = recipe
        self.modules = modules
        self._log: dict[str, dict[str | None, None]] = {}
        self._undo: list[tuple[str, nn.Module, type, type]] = []

    @property
    def replaced(self) -> list[str]:
        """Names of the modules that had an attention call computed by attn-qat.

        Calls are seen as Python runs: in eager mode, and while torch.compile traces.
        """
        return [name for name, outcomes in list(self._log.items()) if None in outcomes]

    @property
    def left(self) -> dict[str, list[str]]:
        """Module name -> why attention calls in it were left as they are; empty with unsupported='raise'."""
        log = {name: list(outcomes) for name, outcomes in list(self._log.items())}
        return {name: [x for x in outcomes if x] for name, outcomes in log.items() if any(outcomes)}

    @property
    def unseen(self) -> list[str]:
        """Chosen modules below which no attention call was seen: not run yet, attention of another kind, or
        run by compiled code that was traced for another layer."""
        return [root for root in self.modules if not any(below(name, [root]) for name in list(self._log))]

    def undo(self) -> None:
        """Gives every module its class back. Does nothing the second time. No thread may be inside the model.

        Raises RuntimeError, and undoes nothing, if another package has changed a module's class or forward
        since.
        """
        with _lock:
            for name, module, _, converted in self._undo:
                if type(module) is not converted or "forward" in vars(module):
                    raise RuntimeError(
                        f"attn_qat.convert: {called(name)} has got another class or forward since it was "
                        "converted; undo that first"
                    )
            for _, module, original, _ in self._undo:
                _take_route(module, original)
            self._undo.clear()

    def __enter__(self) -> Conversion:
        return self

    def __exit__(self, *_) -> None:
        self.undo()

    def __str__(self) -> str:
        replaced, left, unseen = self.replaced, self.left, self.unseen
        lines = [f"attn_qat.convert: recipe {self.recipe}, attention replaced in {len(replaced)} modules"]
        lines += [f"  {called(name)}: replaced" for name in replaced]
        lines += [f"  {called(name)}: left, {reason}" for name, reasons in left.items() for reason in reasons]
        lines += [f"  {called(name)}: no attention call seen" for name in unseen]
        return "\n".join(lines)


def convert(
    model: nn.Module,
    *,
    recipe: str | Recipe = Recipe.FP4,
    modules: Modules | None = None,
    exclude: Modules = (),
    unsupported: str = "raise",
) -> Conversion:
    """Makes attention calls of `model` quantisation-aware, in place, until the returned Conversion is undone.

    Replaced are calls of torch.nn.functional.scaled_dot_product_attention and multi_head_attention_forward
    (hence nn.MultiheadAttention, nn.Transformer*) that the chosen modules make, or anything below them.

    modules: names in the model, patterns ("blocks.*.attn1"; `*` also spans dots) or predicate(name, module).
        A module brings all that lies below it. Default: the whole model.
    exclude: the same, for modules to leave as they are, with all that lies below them.
    unsupported: what becomes of a call that attn-qat does not take, such as one with a mask or dropout.
        "raise", the default: ValueError with the module and the reason. "leave": computed as it is, reported.

    Raises ValueError if nothing is chosen, a name matches nothing, or a chosen module cannot be converted (it
    is converted already, scripted or traced). Other threads may run other models meanwhile.
    """
    recipe = Recipe(recipe)
    if not isinstance(model, nn.Module):
        raise TypeError(f"attn_qat.convert: model is a {type(model).__name__}, takes a torch.nn.Module")
    if unsupported not in ("raise", "leave"):
        raise ValueError(f"attn_qat.convert: unsupported is {unsupported!r}, takes 'raise' or 'leave'")
    with _lock:
        named = named_modules(model)
        chosen = choose(named, "" if modules is None else modules, "attn_qat.convert: modules")
        excluded = choose(named, exclude, "attn_qat.convert: exclude")
        check_one_choice(named, chosen, excluded, "attn_qat.convert")
        conversion = Conversion(recipe, [name for name in chosen if not below(name, excluded)])
        routes = _routes(named, conversion, excluded, unsupported)
        try:
            for name, route in routes.items():
                _give_route(conversion, name, named[name], route)
        except BaseException:
            conversion.undo()
            raise
        return conversion


def _routes(
    named: dict[str, nn.Module], conversion: Conversion, excluded: list[str], unsupported: str
) -> dict[str, TorchFunctionMode | None]:
    """name -> what its forward is to run in, for every module that may call attention or runs one that
    does."""
    routes: dict[str, TorchFunctionMode | None] = {}
    # Of a module's names the first, but a chosen one if there is one.
    chosen_last = sorted(reversed(named), key=lambda name: below(name, conversion.modules))
    names = {id(named[name]): name for name in chosen_last}
    for name, module in named.items():
        if names[id(module)] != name or not _may_attend(module):
            continue
        reason = _why_not_convertible(module)
        if below(name, conversion.modules):
            if reason is not None:
                raise ValueError(f"attn_qat.convert: {called(name)} {reason}")
            left = below(name, excluded)
            routes[name] = _Leave() if left else _Route(name, conversion.recipe, unsupported, conversion._log)
        elif reason is None and any(below(chosen, [name]) for chosen in conversion.modules):
            routes[name] = _Leave() if isinstance(module, _FUSING) else None
    if not any(isinstance(route, _Route) for route in routes.values()):
        raise ValueError(
            "attn_qat.convert: modules chooses none whose forward could call attention, takes attention "
            "modules or modules around them"
        )
    return routes


def _give_route(conversion: Conversion, name: str, module: nn.Module, route) -> None:
    original = type(module)
    converted = _converted(original)
    module.__dict__[_ROUTE] = route  # first: another thread may be running the module
    module.__class__ = converted
    conversion._undo.append((name, module, original, converted))


def _take_route(module: nn.Module, original: type) -> None:
    module.__class__ = original
    del module.__dict__[_ROUTE]
