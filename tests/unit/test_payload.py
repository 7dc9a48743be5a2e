"""What can be shipped to workers, and how a refusal names what can't."""

import functools
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from dbx_tf.driver.payload import pack
from dbx_tf.errors import ArgumentProblem

LOCK = threading.Lock()


def helper() -> Any:
    return LOCK


def uses_global_lock() -> Any:
    with LOCK:
        return 1


def uses_helper() -> Any:
    return helper()


class Trainer:
    """A class of the user's with something that can't be pickled."""

    def __init__(self) -> None:
        self.log = threading.RLock()

    def train(self) -> None:
        """The method that is passed as train_fn."""


def only_problem(train_fn: Callable[..., Any], **kwargs: Any) -> ArgumentProblem:
    payload, problems = pack(train_fn, kwargs)
    assert payload == b""
    (problem,) = problems
    assert isinstance(problem, ArgumentProblem)
    return problem


def test_a_function_and_its_arguments_arrive() -> None:
    """What was packed is the same function with the same arguments."""
    payload, problems = pack(lambda epochs, rate=0.1: epochs * rate, {"epochs": 10})
    train_fn, kwargs = cloudpickle.loads(payload)
    assert problems == ()
    assert train_fn(**kwargs) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("train_fn", "name"),
    [
        (uses_global_lock, "LOCK that uses_global_lock uses"),
        (uses_helper, "LOCK that helper uses"),
        (Trainer().train, "self.log"),
        (functools.partial(lambda lock: None, lock=LOCK), "argument of the partial (lock)"),
    ],
)
def test_what_is_captured_is_named(train_fn: Callable[..., Any], name: str) -> None:
    """A lock that is reached through globals, helpers, objects or partials is found and named."""
    problem = only_problem(train_fn)
    assert name in problem.what
    assert "can't be pickled" in problem.what


def test_a_closure_variable_is_named() -> None:
    """A variable of an enclosing function is found as well."""
    opened = threading.Lock()

    def train_fn() -> Any:
        return opened

    assert "the variable opened that train_fn uses" in only_problem(train_fn).what


def test_an_argument_is_named() -> None:
    """An argument that can't be pickled is told by its name."""
    assert "argument data" in only_problem(lambda data: None, data=(n for n in range(3))).what


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"epochs": 5, "epoch": 5}, "unexpected keyword argument 'epoch'"),
        ({}, "missing a required argument: 'epochs'"),
        ({"kwargs": {"epochs": 5}}, "run(train_fn, **params)"),
    ],
)
def test_arguments_are_checked_against_the_signature(kwargs: dict[str, Any], text: str) -> None:
    """A wrong argument is told on the driver, with what the function takes."""

    def train_fn(epochs: int) -> None:
        pass

    problem = only_problem(train_fn, **kwargs)
    assert text in str(problem)
    assert "(epochs: int)" in str(problem)


def test_a_result_in_place_of_a_function_is_told() -> None:
    """Calling train_fn instead of passing it is a common slip."""
    assert "pass the function itself" in only_problem(3).fix  # type: ignore[arg-type]  # the slip


def load(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_a_module_that_workers_do_not_have_travels_by_value(tmp_path: Path) -> None:
    """A function from a file next to the notebook runs where that file is not, with what it imports from another."""
    (tmp_path / "own_helper_xyz.py").write_text("def factor():\n    return 6\n")
    (tmp_path / "own_module_xyz.py").write_text(
        "import own_helper_xyz\nfrom own_helper_xyz import factor\n"
        "class Scale:\n    by = 7\n"
        "def train_fn():\n    return factor() * Scale.by + own_helper_xyz.factor()\n"
    )
    helper_module = load(tmp_path / "own_helper_xyz.py", "own_helper_xyz")
    module = load(tmp_path / "own_module_xyz.py", "own_module_xyz")
    try:
        payload, problems = pack(module.train_fn, {})
        assert problems == ()
    finally:
        del sys.modules[module.__name__], sys.modules[helper_module.__name__]
    code = "import cloudpickle, sys; f, k = cloudpickle.loads(sys.stdin.buffer.read()); print(f(**k))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], input=payload, capture_output=True, timeout=60, check=True
    )
    assert done.stdout.strip() == b"48"
    assert cloudpickle.list_registry_pickle_by_value() == set()


def test_a_class_in_a_function_finds_its_globals() -> None:
    """Annotations and decorators in the body of a class inside train_fn use globals: they are shipped too."""
    source = (
        "from typing import Any\nimport functools\nLIMIT = 3\n"
        "def train_fn():\n"
        "    class Callback:\n"
        "        limit = LIMIT\n"
        "        @functools.cache\n"
        "        def on_end(self, logs: Any = None) -> Any:\n"
        "            return self.limit\n"
        "    return Callback().on_end()\n"
    )
    notebook: dict[str, Any] = {"__name__": "__main__"}
    exec(source, notebook)  # noqa: S102  # as a notebook's cell
    payload, problems = pack(notebook["train_fn"], {})
    assert problems == ()
    code = "import cloudpickle, sys; f, k = cloudpickle.loads(sys.stdin.buffer.read()); print(f(**k))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], input=payload, capture_output=True, timeout=60, check=True
    )
    assert done.stdout.strip() == b"3"


def test_an_installed_package_travels_by_name() -> None:
    """What is installed is not copied into the payload."""
    payload, _ = pack(functools.partial(pytest.approx, 1), {})
    assert len(payload) < 1000
