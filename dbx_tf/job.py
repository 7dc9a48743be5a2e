"""A training as a job: which train_fn, with which settings and parameters, from a YAML file and a command line.

Runs on: driver.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError

from dbx_tf.driver.result import RunResult
from dbx_tf.driver.runner import Runner
from dbx_tf.driver.tracking import Tracking
from dbx_tf.errors import ArgumentProblem, ConfigError, raise_problems

_TASK_VALUE_BYTES: Final = 48 * 1024  # Databricks' limit, https://docs.databricks.com/jobs/task-values.html


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a configuration file may hold."""

    train_fn: str | None = None
    """`package.module:function` or `path/to/file.py:function`."""
    runner: dict[str, Any] = field(default_factory=dict)
    """Arguments of Runner, all but tracking."""
    tracking: dict[str, Any] = field(default_factory=dict)
    """Arguments of Tracking."""
    params: dict[str, Any] = field(default_factory=dict)
    """Arguments of train_fn."""

    def make_runner(self) -> Runner:
        """The Runner of this job.

        Raises:
            ConfigError: If a setting does not exist or has a wrong type.
        """
        tracking = _valid(Tracking, self.tracking, "tracking")
        if "tracking" in self.runner:
            raise _wrong("runner has tracking", "it is a section of its own", "move it to the top level of the file")
        runner: Runner = _valid(Runner, self.runner, "runner")
        return replace(runner, tracking=tracking)


def load_job(path: Path) -> Job:
    """Read a job from a YAML file.

    Raises:
        ConfigError: If the file can't be read, or holds something else than a job.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise _wrong(f"{path} can't be read ({error.strerror})", "a YAML file", "check the path") from error
    except yaml.YAMLError as error:
        raise _wrong(f"{path} is not YAML ({error})", "see conf/ for an example", "correct the file") from error
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise _wrong(f"{path} holds {found}", f"sections {_names(Job)}", "write at least train_fn: module:function")
    job: Job = _valid(Job, content, str(path))
    return job


def find_train_fn(target: str) -> Callable[..., Any]:
    """The function that `package.module:function` or `path/to/file.py:function` names.

    Modules are looked for in the current folder too; a file's own folder is where it finds its neighbours.

    Raises:
        ConfigError: If it is not there.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        possible = "package.module:function or path/to/file.py:function"
        raise _wrong(f"train_fn is {target!r}", possible, "name the function after a colon")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        what = f"{place} has no function {name}"
        raise _wrong(what, f"it has {', '.join(own) or 'no functions'}", "correct the name after the colon")
    result: Callable[..., Any] = function
    return result


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise _wrong(f"there is no file {path}", "a Python file that the driver can read", "check the path")
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # so that it is shipped with the function, as a module of the user's
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, but something that it imports is not
        possible = "a module that is installed, or lies in the current folder"
        raise _wrong(
            f"there is no module {name}", possible, "install its wheel, or name the file: path/to/file.py:function"
        ) from error


def typed_params(train_fn: Callable[..., Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Turn the texts of a command line into what train_fn's signature says: its annotation, else its default's type.

    Raises:
        ConfigError: If a text is not of that type.
    """
    signature = inspect.signature(train_fn)
    try:
        hints = get_type_hints(train_fn)
    except NameError:  # an annotation for type checkers alone
        hints = {}
    values, problems = {}, []
    for name, text in texts.items():
        parameter = signature.parameters.get(name)
        default = None if parameter is None or parameter.default is parameter.empty else parameter.default
        hint = hints.get(name, Any if default is None else type(default))
        try:
            values[name] = text if hint is str else TypeAdapter(hint).validate_python(yaml.safe_load(text))
        except (ValidationError, yaml.YAMLError):
            wanted = getattr(hint, "__name__", str(hint))
            problems.append(
                ArgumentProblem(
                    "error", f"--param {name}={text}", f"train_fn takes {name} as {wanted}", "correct the value"
                )
            )
    raise_problems(tuple(problems))
    return values


def publish(result: RunResult[Any]) -> str | None:
    """Leave run_id, model_uri and the last metrics as task values of a Databricks job.

    Returns:
        Why it could not be done, or None: also where there are no task values, outside of Databricks.
    """
    if "DATABRICKS_RUNTIME_VERSION" not in os.environ:
        return None
    metrics = {name: values[-1] for name, values in result.history.items() if values}
    if len(json.dumps(metrics)) > _TASK_VALUE_BYTES:
        return "the metrics are larger than Databricks' task values may be"
    try:
        from databricks.sdk.runtime import dbutils

        for key, value in {"run_id": result.run_id, "model_uri": result.model_uri, "metrics": metrics}.items():
            if value is not None:
                dbutils.jobs.taskValues.set(key=key, value=value)
    except Exception as error:  # noqa: BLE001  # whatever it is, the training is done
        return f"the task values could not be set ({type(error).__name__}: {error})"
    return None


def _valid(kind: Any, content: Mapping[str, Any], where: str) -> Any:
    """An instance of a dataclass from what a file gives, or all that is wrong with it."""
    unknown = [name for name in content if name not in {item.name for item in fields(kind)}]
    problems = [
        ArgumentProblem("error", f"{where} has {name}", f"possible are {_names(kind)}", "correct or remove it")
        for name in unknown
    ]
    try:
        valid = TypeAdapter(kind).validate_python(dict(content))
    except ValidationError as error:
        for found in error.errors():
            name = ".".join(str(part) for part in found["loc"])
            if name not in unknown:
                what = (
                    f"{where} has {name}={found['input']!r}" if found["type"] != "missing" else f"{where} lacks {name}"
                )
                problems.append(ArgumentProblem("error", what, found["msg"], "correct it"))
        valid = None
    raise_problems(tuple(problems))
    return valid


def _names(kind: Any) -> str:
    return ", ".join(item.name for item in fields(kind) if item.name != "tracking" or kind is Job)


def _wrong(what: str, possible: str, fix: str) -> ConfigError:
    problem = ArgumentProblem("error", what, possible, fix)
    return ConfigError(str(problem), problems=(problem,))
