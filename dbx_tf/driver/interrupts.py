"""What SIGINT and SIGTERM may break into, and what not.

Runs on: driver.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """End the run in an orderly way when the driver is asked to stop, as a job's cancellation does."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def uninterrupted(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call it in a thread of its own: an interrupt ends the wait for it, but not the call.

    Python raises the exception of a signal wherever the main thread is. Inside a transaction of MLflow's store, that
    leaves a SQLite database locked for as long as the traceback lives, so that the run's end can't be written.
    """
    future: Future[R] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # it is the caller's
            future.set_exception(error)

    threading.Thread(target=call, name="dbx_tf-call", daemon=True).start()
    return future.result()
