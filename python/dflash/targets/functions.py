"""The functions that a model runs: whether they are transformers' and torch's own, and whether they have changed.

Libraries replace methods of classes (``LlamaMLP.forward = ...``) and functions of modules
(``modeling_llama.apply_rotary_pos_emb = ...``), often before this package is imported. A function is original if its
code comes from the file that defines its class or module and has the name under which it is found.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import cache_utils, masking_utils
from transformers.generation.utils import GenerationMixin

from .quantized import added_by_gptqmodel, inside_gptqmodel
from .recurrent import FUNCTIONS as RECURRENT_FUNCTIONS
from .recurrent import only_function_in
from .weights import modules_of

__all__ = ["Functions", "codes_of", "functions_of", "global_hooks", "own_loop_method", "shadowed_method"]

_TORCH, _TRANSFORMERS = (os.path.dirname(package.__file__) + os.sep for package in (torch, transformers))
_MODELS = os.path.join(_TRANSFORMERS, "models", "")
# Where code is looked into for the names that it calls. Elsewhere only the function itself is judged.
_LOOKED_INTO = (
    _MODELS,
    *(os.path.join(_TORCH, "nn", "modules", ""), os.path.join(_TORCH, "nn", "functional.py")),
    *(_TRANSFORMERS + name for name in ("activations", "modeling_rope_utils", "modeling_layers", "masking_utils")),
    *(os.path.join(_TRANSFORMERS, "integrations", name) for name in ("moe", "sdpa_", "flex_", "eager_", "flash_")),
)
_GRAD_WRAPPER = os.path.join(_TORCH, "utils", "_contextlib.py")
_ROOTS = ("__call__", "_wrapped_call_impl", "_call_impl", "forward", "__getattr__", "__getattribute__")
# The parts that this package replaces with its own: masks, caches, attention, recurrences, the loop around the model.
_INTERFACES = ("ALL_ATTENTION_FUNCTIONS", "ALL_MASK_ATTENTION_FUNCTIONS")
_OURS = {*vars(masking_utils), *vars(cache_utils), *_INTERFACES, "eager_attention_forward"} - {"torch", "nn", "F"}
_OURS |= RECURRENT_FUNCTIONS
_CACHES = tuple(getattr(cache_utils, name) for name in ("Cache", "DynamicCache", "DynamicLayer", "CacheLayerMixin",
                "DynamicSlidingWindowLayer") if hasattr(cache_utils, name))  # fmt: skip
# The methods of transformers' loop whose work this package does itself. A replaced ``generate`` is the caller's choice.
_LOOP = (
    *("prepare_inputs_for_generation", "_sample", "_prefill", "_update_model_kwargs_for_generation"),
    *("_prepare_cache_for_generation", "_prepare_attention_mask_for_generation", "_prepare_generated_length"),
    *("_prepare_position_ids_for_generation", "_prepare_model_inputs", "_prepare_special_tokens"),
    *("_get_logits_processor", "_get_stopping_criteria", "_has_unfinished_sequences"),
)
_PLAIN = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_BUILT_IN = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
)
_ALIASES = {("forward", "_forward_unimplemented"), ("__call__", "Module._wrapped_call_impl")}  # of nn.Module itself


class _Place(NamedTuple):
    """Where a function is found: in a class or in a module's namespace, under a name."""

    owner: Any  # the class, or the name of the module
    namespace: Mapping[str, Any]
    name: str

    @property
    def key(self) -> tuple[int, str]:
        """What tells two places apart."""
        return id(self.owner if isinstance(self.owner, type) else self.namespace), self.name

    def __str__(self) -> str:
        owner = self.owner.__name__ if isinstance(self.owner, type) else self.owner
        return f"{owner}.{self.name}"


class Functions:
    """The functions that models of these classes run, as they are now.

    Args:
        classes: of the model's modules, with their bases.
        attention: the name of the model's attention function.

    Attributes:
        replaced: the first function of the forward pass that is not original, or an empty string.
        bypassed: the first that is not original among those that this package replaces with its own.
        names: names of methods of modules that the forward pass calls.
        token: a new object whenever the functions are others.
    """

    def __init__(self, classes: frozenset[type], attention: str) -> None:
        self._classes, self._attention = classes, attention
        self._methods: dict[str, list[_Place]] = {}
        for owner in (*classes, Tensor):
            for name, value in vars(owner).items():
                is_bound = hasattr(type(value), "__get__") or callable(value)
                if isinstance(value, _PLAIN) or (is_bound and owner is not Tensor):
                    self._methods.setdefault(name, []).append(_Place(owner, vars(owner), name))
        # 1. The forward pass; it names the parts that are ours.
        ours: list[_Place] = []
        roots = [place for name in _ROOTS for place in self._methods.get(name, ())]
        walked = _walk(roots, self._methods, ours)
        self.replaced = next((str(place) for place in walked if not _is_original(place)), "")
        called = [place.name for place in walked if place.owner in classes and _is_of_a_family(place.owner)]
        self.names = frozenset([*_ROOTS, *called])
        # 2. Our parts: attention, masks and caches, and what `generate` calls. They call no methods of modules: a
        # layer's own ``to`` or ``device`` (bitsandbytes has some) is not what ``tensor.to`` means there.
        around = _walk([*_of_attention(ours, attention), *_of_generation(classes)], {}, [])
        self.bypassed = next((str(place) for place in around if not _is_original(place)), "")
        # 3. What to compare later.
        self.token = object()
        self._places = [*walked, *around]
        self._inner = [_inner(place.namespace.get(place.name)) for place in self._places]
        self._sizes, self._seen = self._count(), self._read()

    def changed(self) -> str:
        """Return what is another function now, or an empty string. Compares identities, in microseconds."""
        now = self._read()
        if self._seen != now:
            where = [str(place) for place in self._places for _ in range(2)]
            pairs = zip(where, self._seen[1:], now[1:], strict=True)
            return next((name for name, old, new in pairs if old is not new), "a global forward hook")
        if self._sizes != (sizes := self._count()):  # a method that hides one of a base, or an attribute of no interest
            known, names = {place.key for place in self._places}, {place.name for place in self._places}
            for place in Functions(self._classes, self._attention)._places:
                if isinstance(place.owner, type) and place.name in names and place.key not in known:
                    return str(place)
            self._sizes = sizes
        return ""

    def _count(self) -> list[int]:
        return [len(vars(owner)) for owner in (*self._classes, *_CACHES, Tensor)]

    def _read(self) -> list[Any]:
        """Return the functions at all places and the code inside them; either may be replaced."""
        values: list[Any] = [global_hooks()]
        for place, inner in zip(self._places, self._inner, strict=True):
            values += (place.namespace.get(place.name), getattr(inner, "__code__", None))
        return values


# ---------------------------------------------------------------------------------------------- places


def _walk(todo: list[_Place], methods: Mapping[str, list[_Place]], ours: list[_Place]) -> list[_Place]:
    """Return every place that code at these places names; collect in ``ours`` what this package replaces."""
    found: dict[tuple[int, str], _Place] = {}
    while todo:
        place = todo.pop()
        if place.key in found:
            continue
        found[place.key] = place
        code = _code(_inner(place.namespace.get(place.name)))
        if code is None or not code.co_filename.startswith(_LOOKED_INTO):
            continue
        names = _names(code)
        todo += [method for name in names for method in methods.get(name, ())]
        for named in _named_globals(_inner(place.namespace[place.name]).__globals__, names):
            is_ours = named.name in _OURS and code.co_filename.startswith(_MODELS)
            (ours if is_ours else todo).append(named)
    return list(found.values())


def _of_attention(ours: list[_Place], attention: str) -> list[_Place]:
    """Return the masks and the attention function that the model's code would call."""
    places = [place for place in ours if place.name not in (*_INTERFACES, "eager_attention_forward")]
    if attention == "eager":
        places += [place for place in ours if place.name == "eager_attention_forward"]
    for place in (*ours, _Place("masking_utils", vars(masking_utils), "ALL_MASK_ATTENTION_FUNCTIONS")):
        if place.name in _INTERFACES:
            interface = place.namespace.get(place.name)
            places.append(_Place(type(interface), vars(type(interface)), "_global_mapping"))
            for mapping in (getattr(interface, "_local_mapping", {}), getattr(interface, "_global_mapping", {})):
                if attention in mapping:
                    places.append(_Place(place.name, mapping, attention))
                    break
    return places


def _of_generation(classes: frozenset[type]) -> list[_Place]:
    """Return the methods of transformers' caches and of its generation loop."""
    caches = [(owner, name) for owner in _CACHES for name, value in vars(owner).items() if isinstance(value, _PLAIN)]
    known = [owner for owner in classes if issubclass(owner, GenerationMixin) and _is_known(owner)]
    loop = [(owner, name) for owner in known for name in _LOOP if name in vars(owner)]
    return [_Place(owner, vars(owner), name) for owner, name in (*caches, *loop)]


def _named_globals(namespace: dict[str, Any], names: list[str]) -> Iterator[_Place]:
    """Yield the functions that code with these names may call in its module and in torch's modules."""
    modules = {id(namespace): (namespace.get("__name__", "?"), namespace)}
    todo = [namespace]
    while todo:
        values = todo.pop()
        for name in names:
            value = values.get(name)
            if isinstance(value, types.ModuleType) and _is_followed(value.__name__) and id(vars(value)) not in modules:
                modules[id(vars(value))] = (value.__name__, vars(value))
                todo.append(vars(value))
    for owner, values in modules.values():
        for name in names:
            value = values.get(name)
            is_interface = name in _INTERFACES and value is not None
            if is_interface or (callable(value) and not name.startswith("has_torch_function")):  # has other names
                yield _Place(owner, values, name)


def _is_followed(module: str) -> bool:
    """Return True for a module whose functions a model calls by their names in the module."""
    return module in ("torch", "torch.functional", "torch._C._nn") or module.startswith(("torch.nn", "transformers."))


def _names(code: types.CodeType) -> list[str]:
    """Return the names that a function's code, and the functions inside it, look up."""
    inside = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return list(dict.fromkeys([*code.co_names, *inside]))


# ---------------------------------------------------------------------------------------------- judging


def _is_original(place: _Place) -> bool:
    value = place.namespace.get(place.name)
    if value is None or place.name == "_global_mapping":
        return True
    if not isinstance(value, _PLAIN):
        if isinstance(value, _BUILT_IN):
            return value.__name__ == place.name
        if isinstance(value, type):
            return _is_known(value)
        is_module = isinstance(value, nn.Module) and _is_known(type(value))
        return is_module or place.name in _INTERFACES or type(value).__module__ == "typing"
    function = _unwrapped(value)
    if function is None:
        return False
    code = function.__code__
    if not _is_compiled_from_its_file(code, function.__globals__.get("__name__")):
        return False
    if added_by_gptqmodel(function):
        return True
    named = getattr(code, "co_qualname", function.__qualname__)  # Python 3.10 has none
    if isinstance(place.owner, type):
        return _is_method_of(place.owner, place.name, code.co_filename, named)
    own = place.namespace.get("__file__")
    file = code.co_filename
    is_theirs = file == own or (file.startswith((_TORCH, _TRANSFORMERS)) and not file.startswith(_MODELS))
    is_interface = place.owner in _INTERFACES  # their keys are not names of functions
    return is_theirs and (is_interface or code.co_name == place.name or "<locals>" in function.__qualname__)


def _is_compiled_from_its_file(code: types.CodeType, module: Any) -> bool:
    """Return False for code that names a file of transformers or torch and is not in it."""
    if not isinstance(module, str):
        return False
    known = codes_of(module)
    return not known or code in known


@functools.cache
def codes_of(module: str) -> frozenset[types.CodeType]:
    """Return the code of all functions in a module's file, as Python's loader compiles it; nothing without a file."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    try:
        todo = [spec.loader.get_code(spec.name)]
    except Exception:
        return frozenset()
    found: set[types.CodeType] = set()
    while todo:
        code = todo.pop()
        found.add(code)
        todo += [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(found)


def _is_method_of(owner: type, name: str, file: str, named: str) -> bool:
    """Return True if code of this file and name is what a class, or one of its bases, defines."""
    if owner is Tensor:
        return file.startswith(_TORCH)
    if owner is nn.Module and file == torch_module.__file__ and (name, named) in _ALIASES:
        return True
    for base in owner.__mro__:
        home = getattr(sys.modules.get(base.__module__), "__file__", None)
        if _is_known(base) and file == home and named in (f"{base.__qualname__}.{name}", name):
            return True
    return False


def _is_known(kind: type) -> bool:
    """Return True for a class of torch, transformers or Python."""
    root = kind.__module__.partition(".")[0]
    return root in ("torch", "transformers", "builtins") or root in sys.stdlib_module_names


def _is_of_a_family(kind: type) -> bool:
    return not kind.__module__.startswith("torch.") and not kind.__module__.startswith("transformers.modeling_")


def _unwrapped(value: Any) -> types.FunctionType | None:
    """Return the function inside transformers' own wrappers; None if a wrapper is somebody else's."""
    *wrappers, function = _chain(value)
    if not isinstance(function, types.FunctionType) or not all(map(_is_own_wrapper, wrappers)):
        return None
    return function


def _is_own_wrapper(wrapper: Any) -> bool:
    """Return True for a wrapper of transformers or GPTQModel, or one of torch's that only turns gradients off."""
    code = _code(wrapper)
    if inside_gptqmodel(wrapper) is not None:
        return _is_compiled_from_its_file(code, wrapper.__module__)
    if code is None or not code.co_filename.startswith(_GRAD_WRAPPER):
        return code is not None and code.co_filename.startswith(_TRANSFORMERS)
    inside = dict(zip(code.co_freevars, wrapper.__closure__ or (), strict=True))
    factory = inside["ctx_factory"].cell_contents if "ctx_factory" in inside else None
    return type(getattr(factory, "__self__", None)) in (torch.no_grad, torch.inference_mode, torch.enable_grad)


def _inner(value: Any) -> Any:
    return _chain(value)[-1]


def _chain(value: Any) -> list[Any]:
    """Return a function and what it says that it wraps, the innermost last."""
    chain = [_function(value)]
    while (wrapped := _function(getattr(chain[-1], "__wrapped__", _hidden(chain[-1])))) is not None:
        if any(wrapped is known for known in chain):
            break
        chain.append(wrapped)
    return chain


def _hidden(wrapper: Any) -> Any:
    """Return what a wrapper wraps without saying so: some of GPTQModel, and of transformers 5.15."""
    file = getattr(_code(wrapper), "co_filename", "")
    if not file.startswith(_TRANSFORMERS) or "<locals>" not in wrapper.__qualname__:
        return inside_gptqmodel(wrapper)
    return only_function_in(wrapper)


def _function(value: Any) -> Any:
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value.func if isinstance(value, functools.cached_property) else value


def _code(function: Any) -> types.CodeType | None:
    return function.__code__ if isinstance(function, types.FunctionType) else None


# ---------------------------------------------------------------------------------------------- models


_KEPT = 8
_examined: dict[tuple, Functions] = {}


def functions_of(model: nn.Module) -> Functions:
    """Return the functions that a model runs. They are examined once, until one of them is replaced."""
    kinds = frozenset(map(type, modules_of(model)))
    attention = getattr(model.config, "_attn_implementation", None) or "eager"
    known = _examined.get((kinds, attention))
    if known is not None and not known.changed():
        return known
    classes = frozenset(base for kind in kinds for base in kind.__mro__ if base is not object)
    if len(_examined) >= _KEPT:
        _examined.clear()
    known = _examined[kinds, attention] = Functions(classes, attention)
    return known


def global_hooks() -> tuple:
    """Return torch's hooks on the forward pass of every module."""
    hooks = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    return tuple(hook for registered in hooks for hook in registered.values())


def own_loop_method(model: nn.Module) -> str:
    """Return the first method of transformers' loop that a model has of its own, or an empty string.

    peft leaves the class's own method in the instance; that is no replacement.
    """
    for name in _LOOP:
        method = model.__dict__.get(name)
        if method is not None and getattr(method, "__func__", method) is not getattr(type(model), name, None):
            return f"{type(model).__name__}.{name}"
    return ""


def shadowed_method(model: nn.Module, names: frozenset[str]) -> str:
    """Return the name of the first method that a module has of its own in place of its class's, or an empty string."""
    for module in model.modules():
        if not names.isdisjoint(module.__dict__):
            for name in names & module.__dict__.keys():
                if callable(module.__dict__[name]):
                    return f"{type(module).__name__}.{name}"
    return ""
