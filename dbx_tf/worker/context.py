"""What train_fn may ask of the run it is part of.

Runs on: workers (in the training process); in plain Python it stands for a run of one worker.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from dbx_tf.cluster import per_replica_batch_size
from dbx_tf.wire.channel import Body
from dbx_tf.wire.events import Event


def _log_nowhere(key: str, value: float, step: int) -> None:
    """Outside a run there is nothing to log to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """This worker's place in the run."""

    strategy: Any
    """The `tf.distribute.Strategy` that train_fn runs under."""
    worker_index: int
    """This worker's position, from 0."""
    num_workers: int
    """Workers in the run (count)."""
    scratch_dir: Path
    """A folder of this worker's own on its local disk; removed when the run ends."""
    _log: Callable[[str, float, int], None] = field(default=_log_nowhere, repr=False)
    _ask: Callable[[Event, Body], tuple[Event, IO[bytes]]] | None = field(default=None, repr=False)

    @property
    def num_replicas(self) -> int:
        """Model copies over all workers, `strategy.num_replicas_in_sync` (count)."""
        return int(self.strategy.num_replicas_in_sync)

    @property
    def is_chief(self) -> bool:
        """True on worker 0, the one that reports metrics and whose model is logged."""
        return self.worker_index == 0

    def per_replica_batch_size(self, global_batch_size: int) -> int:
        """Examples each replica gets of a global batch (examples).

        Raises:
            ConfigError: If the batch does not divide evenly; the message names the nearest sizes that do.
        """
        return per_replica_batch_size(global_batch_size, self.num_replicas)

    def log_metric(self, key: str, value: float, step: int = 0) -> None:
        """Log a metric to the MLflow run; workers other than the chief may call it too, to no effect.

        Args:
            key: Name of the metric.
            value: A number, or anything `float()` takes, such as a scalar tensor.
            step: What the value belongs to, such as the index of an epoch.
        """
        self._log(key, float(value), int(step))


_current: WorkerContext | None = None


def set_context(context: WorkerContext | None) -> None:
    """Enter (or, with None, leave) a run: for the training process."""
    global _current  # noqa: PLW0603  # one training process is one worker of one run
    _current = context


@functools.cache
def _plain_scratch() -> tempfile.TemporaryDirectory[str]:
    """The scratch folder where there is no run; removed when the interpreter ends."""
    return tempfile.TemporaryDirectory(prefix="dbx_tf-plain-")


def ask_driver(event: Event, body: Body) -> tuple[Event, IO[bytes]]:
    """Send the driver a request and wait for its answer: for worker.relay.

    Raises:
        LookupError: If there is no run.
        OSError, EOFError: If the driver is gone.
    """
    if _current is None or _current._ask is None:
        raise LookupError("there is no run in this process")
    return _current._ask(event, body)


def get_context() -> WorkerContext:
    """The context of the worker this code runs on.

    Outside of a run, such as in a unit test of a train_fn, it describes one worker that trains alone under
    TensorFlow's current strategy.
    """
    if _current is not None:
        return _current
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    return WorkerContext(
        strategy=strategy,
        worker_index=0,
        num_workers=1,
        scratch_dir=Path(_plain_scratch().name),
    )
