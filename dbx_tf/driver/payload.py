"""What is shipped to the workers: train_fn with its arguments, pickled here or refused here.

Runs on: driver.
"""

from __future__ import annotations

import dis
import functools
import inspect
import io
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import cloudpickle

from dbx_tf.errors import ArgumentProblem, Problem

_INSIDE: Final = "create it inside train_fn"
_REFUSED: Final = {
    # (top package, class name): (what happens to it, what to do). Matched by name, so that nothing is imported here.
    ("pyspark", "SparkSession"): (
        "it exists only on the driver",
        "read the data before, or from files inside train_fn",
    ),
    ("pyspark", "SparkContext"): (
        "it exists only on the driver",
        "read the data before, or from files inside train_fn",
    ),
    ("pyspark", "DataFrame"): ("it can be read only on the driver", "write it to files and read those inside train_fn"),
    ("pyspark", "RDD"): ("it can be read only on the driver", "write it to files and read those inside train_fn"),
    ("tensorflow", "DatasetV2"): ("a dataset can't leave its process", _INSIDE),
    ("tensorflow", "StrategyBase"): ("a strategy belongs to one process", f"{_INSIDE}, or leave it to dbx_tf"),
    ("tensorflow", "Variable"): ("it would arrive as a copy that is not mirrored", _INSIDE),
    ("keras", "Model"): ("it would arrive as a copy outside of the workers' strategy", _INSIDE),
    ("keras", "Layer"): ("it would arrive as a copy outside of the workers' strategy", _INSIDE),
    ("keras", "BaseOptimizer"): ("it would arrive as a copy outside of the workers' strategy", _INSIDE),
    ("keras", "Metric"): ("it would arrive as a copy outside of the workers' strategy", _INSIDE),
    ("tf_keras", "Model"): ("it would arrive as a copy outside of the workers' strategy", _INSIDE),
    ("tf_keras", "Layer"): ("it would arrive as a copy outside of the workers' strategy", _INSIDE),
    ("tf_keras", "Optimizer"): ("it would arrive as a copy outside of the workers' strategy", _INSIDE),
    ("mlflow", "ActiveRun"): ("the run is open on the driver alone", "call mlflow.log_* inside train_fn without it"),
    ("dbruntime", "DBUtils"): ("it exists only on the driver", "pass the values that you need as arguments"),
}
_RUNTIME_ROOT: Final = "/databricks/"  # a Databricks runtime keeps its own Python files here on every node


class _RefusedError(Exception):
    """An object was met while pickling that would arrive broken, or not at all."""

    def __init__(self, obj: Any, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.type_name, self.reason, self.fix = type(obj).__name__, reason, fix


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    def reducer_override(self, obj: Any) -> Any:
        for base in type(obj).__mro__:
            found = _REFUSED.get((base.__module__.partition(".")[0], base.__name__))
            if found is not None:
                raise _RefusedError(obj, *found)
        return super().reducer_override(obj)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        # cloudpickle 3.1 does not see the globals that the body of a class inside a function uses, such as the
        # annotations of a callback's methods; on the worker they would be a NameError.
        reduced = super()._dynamic_function_reduce(func)
        used = {name: func.__globals__[name] for name in _class_body_names(func.__code__) if name in func.__globals__}
        reduced[2][1]["__globals__"].update(used)
        return reduced


def _class_body_names(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_NAME"}
    return names.union(*(_class_body_names(const) for const in code.co_consts if isinstance(const, types.CodeType)))


def pack(train_fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[bytes, tuple[Problem, ...]]:
    """Pickle train_fn and its arguments for the workers.

    Functions and classes from the caller's own modules (those that are not installed packages) travel by value, since
    the workers may not have these modules.

    Returns:
        The pickle, and the problems found; with a problem the pickle is empty.
    """
    problem = _check_arguments(train_fn, kwargs)
    if problem is not None:
        return b"", (problem,)
    try:
        return _dump((train_fn, dict(kwargs))), ()
    except Exception as error:  # noqa: BLE001  # a __reduce__ of the user's may raise anything
        return b"", (_explain(train_fn, kwargs, error),)


def _check_arguments(train_fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> Problem | None:
    if not callable(train_fn):
        return ArgumentProblem(
            "error",
            f"train_fn is {train_fn!r}, a {type(train_fn).__name__}",
            "it has to be a function",
            "pass the function itself: runner.run(train_fn, epochs=5), not runner.run(train_fn(epochs=5))",
        )
    try:
        signature = inspect.signature(train_fn)
        signature.bind(**kwargs)
    except ValueError:  # a builtin without a signature
        return None
    except TypeError as error:
        given = ", ".join(kwargs) or "nothing"
        name = getattr(train_fn, "__name__", type(train_fn).__name__)
        fix = "pass each argument by its own name: run(train_fn, epochs=5)"
        if "kwargs" in kwargs:
            fix += "; a dict of arguments is unpacked with two stars: run(train_fn, **params)"
        return ArgumentProblem("error", f"train_fn was given {given} ({error})", f"it takes {name}{signature}", fix)
    return None


def _dump(obj: Any) -> bytes:
    buffer = io.BytesIO()
    with _own_modules_by_value():
        _Packer(buffer).dump(obj)
    return buffer.getvalue()


@contextmanager
def _own_modules_by_value() -> Iterator[None]:
    registered = []
    for module in list(sys.modules.values()):
        if is_own(module) and module.__name__ not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


@functools.cache
def _installed_roots() -> tuple[str, ...]:
    """Folders whose modules count as installed, on the workers as well as here."""
    roots = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), str(Path(__file__).parents[1])}
    spark = sys.modules.get("pyspark")
    roots |= set(spark.__path__) if spark else set()  # a cluster's Spark is not in site-packages
    return (_RUNTIME_ROOT, *(str(Path(root).resolve()) + "/" for root in roots))


def is_own(module: types.ModuleType) -> bool:
    """True for a module of the caller's that is no installed package: the workers may not have it."""
    file, name = getattr(module, "__file__", None), getattr(module, "__name__", None)
    if not file or name == "__main__" or sys.modules.get(str(name)) is not module:
        return False
    path = Path(file).resolve()
    # whichever environment it belongs to: one may be layered on another
    in_packages = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return not in_packages and not str(path).startswith(_installed_roots())


def _explain(train_fn: Callable[..., Any], kwargs: Mapping[str, Any], error: Exception) -> Problem:
    """Name the variable that can't be shipped: far more useful than what pickle says."""
    for where, value in [*((f"argument {name}", value) for name, value in kwargs.items()), *_captured(train_fn, set())]:
        try:
            _dump(value)
        except _RefusedError as refused:
            return ArgumentProblem(
                "error", f"{where} holds a {refused.type_name} and can't be shipped", refused.reason, refused.fix
            )
        except Exception as cause:  # noqa: BLE001  # as in pack
            return ArgumentProblem(
                "error",
                f"{where}, a {type(value).__name__}, can't be pickled ({type(cause).__name__}: {cause})",
                "train_fn and all that it uses is pickled for the workers",
                "create it inside train_fn, or pass plain data to make it from",
            )
    return ArgumentProblem(
        "error",
        f"train_fn can't be pickled ({type(error).__name__}: {error})",
        "train_fn and all that it uses is pickled for the workers",
        "create what it needs inside of it",
    )


def _captured(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """What a function takes with it, innermost first, as (how it is reached, value)."""
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        yield from ((f"an argument of the partial ({name})", v) for name, v in function.keywords.items())
        yield from ((f"argument {index} of the partial", v) for index, v in enumerate(function.args))
        yield from _captured(function.func, seen)
        return
    if isinstance(function, types.MethodType):
        yield from ((f"self.{name}", value) for name, value in getattr(function.__self__, "__dict__", {}).items())
        function = function.__func__
    if not isinstance(function, types.FunctionType):
        return
    variables = inspect.getclosurevars(function)
    for name, value in {**variables.globals, **variables.nonlocals}.items():
        if isinstance(value, types.FunctionType | functools.partial | types.MethodType):
            yield from _captured(value, seen)
        elif not isinstance(value, types.ModuleType):
            yield f"the variable {name} that {function.__name__} uses", value
    yield from ((f"a default argument of {function.__name__}", value) for value in function.__defaults__ or ())
