"""Reports every Keras fit to the driver: metrics per epoch, without a callback in the user's code.

Runs on: workers, in the training process.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dbx_tf.errors import DbxTfError
from dbx_tf.wire.events import Event, Metrics
from dbx_tf.worker import fit_data


class Reporter:
    """Follows the fits of one training process; remembers the last model that was fitted."""

    def __init__(
        self,
        send: Callable[[Event], None],
        prepare: Callable[[Any, dict[str, Any]], tuple[list[Any], list[Any]]] = lambda _model, _arguments: ([], []),
    ) -> None:
        """Report through `send`.

        Args:
            send: Takes the events.
            prepare: Called with the model and fit's arguments; may refuse, and returns callbacks to run before the
                user's and after them.
        """
        self._send, self._prepare = send, prepare
        self.model: Any = None
        """The model that was fitted last (None before the first fit)."""
        self.inputs: Any = None
        """Its inputs in that fit, as a structure of shapes and dtypes (None if they can't be told)."""
        self._next_step = 0

    @contextmanager
    def watch(self, keras: Any) -> Iterator[None]:
        """Report the fits of all models of this Keras (the module `keras` or `tf_keras`) while the context is open."""
        original = keras.Model.fit
        signature = inspect.signature(original)

        @functools.wraps(original)
        def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = signature.bind(model, *args, **kwargs)
            call.apply_defaults()
            own = self.callbacks(call.arguments)
            first, last = self._prepare(model, call.arguments)
            all_callbacks = [*first, *own, *last, self._callback(keras, call.arguments)]
            if isinstance(call.arguments["callbacks"], keras.callbacks.CallbackList):
                call.arguments["callbacks"].callbacks[:] = all_callbacks
            else:
                call.arguments["callbacks"] = all_callbacks
            self.model = model
            self.inputs = fit_data.describe(call.arguments["x"])
            try:
                return original(*call.args, **call.kwargs)
            except Exception as error:
                # AutoGraph makes another error of one that is raised in a step.
                ours = _cause(error)
                if ours is None or ours is error:
                    raise
                raise ours from None

        keras.Model.fit = fit
        try:
            yield
        finally:
            keras.Model.fit = original

    @staticmethod
    def callbacks(fit_arguments: dict[str, Any]) -> list[Any]:
        """The user's callbacks for a fit."""
        given = fit_arguments["callbacks"]
        given = getattr(given, "callbacks", given)  # a CallbackList
        return list(given) if isinstance(given, list | tuple) else [given] if given else []

    def _callback(self, keras: Any, fit_arguments: dict[str, Any]) -> Any:
        reporter, batch_size = self, fit_data.batch_size(fit_arguments)
        num_rows = fit_data.num_rows(fit_arguments)

        class EpochReporter(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
            """Sends the logs of each epoch; reads no variable that would need the other workers."""

            def __init__(self) -> None:
                super().__init__()
                self.offset: int | None = None
                self.validation_seconds = 0.0

            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                if self.offset is None:
                    # A second fit goes on where the first ended, unless its initial_epoch already says so.
                    self.offset = max(reporter._next_step - epoch, 0)
                self.started, self.first_iteration = time.monotonic(), _iterations(self.model)
                self.validation_seconds = 0.0

            def on_test_begin(self, logs: Any = None) -> None:
                self.test_started = time.monotonic()

            def on_test_end(self, logs: Any = None) -> None:
                self.validation_seconds += time.monotonic() - self.test_started

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                seconds = time.monotonic() - self.started
                values = {"epoch_seconds": seconds}
                num_steps = _iterations(self.model) - self.first_iteration
                if batch_size and num_steps > 0:
                    num_examples = min(num_steps * batch_size, num_rows or sys.maxsize)
                    values["examples_per_second"] = num_examples / max(seconds - self.validation_seconds, 1e-9)
                step = epoch + (self.offset or 0)
                reporter._next_step = step + 1
                reporter._send(Metrics(values={**to_floats(logs or {}), **values}, step=step, is_epoch=True))

        return EpochReporter()


def _cause(error: BaseException | None) -> DbxTfError | None:
    while error is not None and not isinstance(error, DbxTfError):
        error = error.__cause__ or error.__context__
    return error


def to_floats(logs: dict[str, Any]) -> dict[str, float]:
    """Scalars as floats; a vector (such as F1 per class) becomes `name_0`, `name_1`, ..."""
    import numpy as np

    values: dict[str, float] = {}
    for name, value in logs.items():
        array = np.asarray(value, dtype=float).ravel()
        if array.size == 1:
            values[name] = float(array[0])
        else:
            values.update({f"{name}_{index}": float(item) for index, item in enumerate(array)})
    return values


def _iterations(model: Any) -> int:
    optimizer = getattr(model, "optimizer", None)
    iterations = getattr(optimizer, "iterations", None)
    return 0 if iterations is None else int(iterations.numpy())
