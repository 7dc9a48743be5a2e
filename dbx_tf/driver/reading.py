"""Reads what train_fn's code names, without running it: modules, attributes and texts.

Runs on: driver. What is found is a hint, never a proof: a name may be used or not.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dbx_tf.driver.payload import is_own


@dataclass(frozen=True, slots=True)
class Used:
    """What train_fn, and what it calls of the caller's own code, names."""

    modules: frozenset[str] = frozenset()
    """Modules that are imported inside, or that a global name stands for."""
    names: frozenset[str] = frozenset()
    """Global names and attributes."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Literals and text arguments, each with where it is."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What train_fn is called with: the arguments given, and the defaults of the others."""


def read(train_fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> Used:
    """Read train_fn, the functions and classes of the caller's that it uses, and its arguments, which have to fit."""
    modules, names, texts = set[str](), set[str](), dict[str, str]()
    for code in _codes(train_fn, set(), modules):
        names.update(code.co_names)
        modules.update(i.argval for i in dis.get_instructions(code) if i.opname == "IMPORT_NAME")
        texts.update({text: f"in {code.co_name}" for text in code.co_consts if isinstance(text, str)})
    arguments = dict(kwargs)
    with contextlib.suppress(ValueError):  # a builtin without a signature
        bound = inspect.signature(train_fn).bind(**kwargs)
        bound.apply_defaults()
        arguments = {**bound.arguments, **kwargs}
    texts.update({str(v): f"argument {name}" for name, v in arguments.items() if isinstance(v, str | Path)})
    return Used(frozenset(modules), frozenset(names), texts, arguments)


def _codes(obj: Any, seen: set[int], modules: set[str]) -> Iterator[types.CodeType]:
    """The code of a function or class and of all that it reaches; modules met on the way are added."""
    if id(obj) in seen:
        return
    seen.add(id(obj))
    kind = type(obj)  # not isinstance, which asks the object: it may stand for another that is not there
    if issubclass(kind, types.ModuleType):
        modules.add(obj.__name__)
    elif issubclass(kind, functools.partial):
        yield from _codes(obj.func, seen, modules)
    elif issubclass(kind, types.MethodType | staticmethod | classmethod):
        yield from _codes(obj.__func__, seen, modules)
    elif issubclass(kind, type) and _is_callers(obj):
        for member in vars(obj).values():
            yield from _codes(member, seen, modules)
    elif issubclass(kind, types.FunctionType) and _is_callers(obj):
        yield from _nested(obj.__code__)
        yield from _codes(getattr(obj, "__wrapped__", None), seen, modules)
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            variables = inspect.getclosurevars(obj)
            for value in (*variables.globals.values(), *variables.nonlocals.values()):
                yield from _codes(value, seen, modules)


def _is_callers(obj: Any) -> bool:
    module = sys.modules.get(obj.__module__ or "")
    return module is None or module.__name__ == "__main__" or is_own(module)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
