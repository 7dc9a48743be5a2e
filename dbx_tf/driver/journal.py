"""Keeps what the workers of a run say about their training: output, metrics, notices and the model's files.

Runs on: driver, called on the channel's threads.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import IO, Any, Final

from dbx_tf.driver.secrets import Secrets
from dbx_tf.driver.tracker import NullTracker
from dbx_tf.wire.channel import save_body
from dbx_tf.wire.events import Event, Metrics

_NOISE: Final = re.compile(r"[IW]\d{4} \d\d:\d\d:\d\d|WARNING: All log messages before absl|.*failed call to cuInit")
"""What TensorFlow says at every start, whatever its log level; it stays in the log file."""


class NullJournal:
    """Stands in for a journal where nothing is kept."""

    def masked(self, event: Event) -> Event:
        """The event: nothing of it is shown."""
        return event

    def add_notice(self, text: str) -> None:
        """Nothing is kept."""

    def add_metrics(self, worker_index: int, metrics: Metrics) -> None:
        """Nothing is kept."""

    def add_output(self, worker_index: int, lines: list[str]) -> None:
        """Nothing is kept."""

    def add_model_file(self, path: str, body: IO[bytes]) -> None:
        """Nothing is kept."""


class Journal(NullJournal):
    """The story of one run."""

    def __init__(self, folder: Path, tracker: NullTracker, show: Callable[[str], None], secrets: Secrets) -> None:
        self.notices: list[str] = []
        self.history: dict[str, list[float]] = {}
        self.model_folder, self.log_folder = folder / "model", folder / "logs"
        self.log_folder.mkdir()
        self._tracker, self._show, self._secrets = tracker, show, secrets
        self._lock = threading.Lock()

    def masked(self, event: Event) -> Event:
        """The event without secrets."""
        return self._secrets.mask_event(event)

    def add_notice(self, text: str) -> None:
        """Show a sentence, and keep it for the result; the same one only once."""
        text = self._secrets.mask(text)
        with self._lock:
            if text in self.notices:
                return
            self.notices.append(text)
        self._show(text)

    def add_metrics(self, worker_index: int, metrics: Metrics) -> None:
        """Take the chief's metrics; those of the others are the same."""
        if worker_index != 0:
            return
        if metrics.is_epoch:
            for name, value in metrics.values.items():
                self.history.setdefault(name, []).append(value)
        self._tracker.log_metrics(metrics)

    def add_returned(self, value: Any) -> None:
        """Without a Keras fit, take the metrics that train_fn returned: a dict of lists of numbers, one per epoch."""
        if self.history or not isinstance(value, dict):
            return
        columns = {str(name): column for name, column in value.items() if _is_numbers(column)}
        for step in range(max(map(len, columns.values()), default=0)):
            row = {name: float(column[step]) for name, column in columns.items() if step < len(column)}
            self.add_metrics(0, Metrics(values=row, step=step, is_epoch=True))

    def add_output(self, worker_index: int, lines: list[str]) -> None:
        """Write a worker's output to its log; show the chief's."""
        with (self.log_folder / f"worker_{worker_index}.log").open("a") as log:
            log.write("\n".join(lines) + "\n")
        if worker_index == 0:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.write("".join(f"[0] {line}\n" for line in lines if not _NOISE.match(line)))
                sys.stdout.flush()

    def add_model_file(self, path: str, body: IO[bytes]) -> None:
        """Keep a file of the chief's model."""
        parts = PurePosixPath(path).parts
        if not parts or ".." in parts or parts[0] == "/":
            raise ValueError(f"not a path inside of a model: {path!r}")
        save_body(body, self.model_folder.joinpath(*parts))


def _is_numbers(column: Any) -> bool:
    if not isinstance(column, list | tuple) or not column:
        return False
    return all(isinstance(item, int | float) or getattr(item, "shape", None) == () for item in column)
