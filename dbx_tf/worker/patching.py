"""Replaces functions of Keras's for the time of a run.

Runs on: workers, in the training process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from dbx_tf.worker.step import current


@contextmanager
def all_of(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    """Several contexts as one."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def replaced(owner: Any, **functions: Callable[[Any], Any]) -> Iterator[None]:
    """Replace attributes of a class or module by what each function makes of the original."""
    originals = {name: getattr(owner, name) for name in functions}
    for name, make in functions.items():
        setattr(owner, name, functools.wraps(originals[name])(make(originals[name])))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)


def in_step(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """Replace a function, for `replaced`, in the steps of Keras: `change` gets the step, the original and its args."""

    def make(original: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            step = current()
            return original(*args, **kwargs) if step is None else change(step, original, *args, **kwargs)

        return function

    return make
