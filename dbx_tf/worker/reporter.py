"""Reports every Keras fit to the driver: metrics per epoch, without a callback in the user's code.

Runs on: workers, in the training process.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from dbx_tf.errors import DbxTfError
from dbx_tf.wire.events import Event, Metrics, Progressed
from dbx_tf.worker import fit_data

_PROGRESS_SECONDS: Final = 1.0
_MIN_CPU_SHARE: Final = 0.1
"""A process that waits for others uses less of one core than that."""


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
        self._num_steps = self._num_fits = 0

    def _tell_progress(self, is_over: threading.Event) -> None:
        """Tell every second that steps were finished.

        Outside of fit, where nobody counts steps (a loop of the user's), using the processor counts as progress.
        """
        told, cpu_seconds = -1, 0.0
        while not is_over.wait(_PROGRESS_SECONDS):
            used, cpu_seconds = time.process_time() - cpu_seconds, time.process_time()
            if self._num_steps != told or (not self._num_fits and used > _MIN_CPU_SHARE * _PROGRESS_SECONDS):
                told = self._num_steps
                self._send(Progressed(num_steps=told))

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
            self._num_fits += 1
            try:
                return original(*call.args, **call.kwargs)
            except Exception as error:
                # AutoGraph makes another error of one that is raised in a step.
                ours = _cause(error)
                if ours is None or ours is error:
                    raise
                raise ours from None
            finally:
                self._num_fits -= 1

        keras.Model.fit = fit
        is_over = threading.Event()
        threading.Thread(target=self._tell_progress, args=(is_over,), name="dbx_tf-progress", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()
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

            async_safe = True  # Keras 3 need not wait for a step's logs, of which no use is made

            def __init__(self) -> None:
                super().__init__()
                self._supports_tf_logs = True  # the same in tf_keras
                self.offset: int | None = None
                self.validation_seconds = 0.0

            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                reporter._num_steps += 1

            def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
                reporter._num_steps += 1

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
