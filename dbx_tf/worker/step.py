"""The Keras step that a replica is in: which share of the global batch its rows are, and what was scaled by it.

Runs on: workers, in the training process. Gradients are summed over the replicas, so a replica's mean loss counts by
its rows' share of the global batch. One over the number of replicas, which TensorFlow and Keras use, is that share only
if the batch divides evenly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

_local = threading.local()  # TensorFlow runs each replica of a worker in a thread of its own


class Step:
    """One replica's step, while it is traced (or run, in eager mode)."""

    def __init__(self, owner: str, batch: Any, share: Any, num_replicas: int) -> None:
        self.owner = owner
        """The name of the model's class."""
        self._batch, self._share = batch, share
        self.num_replicas = num_replicas
        """Model copies over all workers (count)."""
        self.is_scaled = False
        """True once the step has asked for what a loss has to be divided by."""
        self.is_in_loss = False
        """True inside of compute_loss, whose result is scaled as a whole."""
        self._scaled: list[Any] = []

    @property
    def share(self) -> Any:
        """This replica's rows over the rows of the global batch: a float32 scalar."""
        if self._share is None:
            # Data that TensorFlow has split: the workers have to tell each other, once a step.
            rows = tf.cast(num_rows(self._batch), tf.float32)
            self._share = tf.math.divide_no_nan(rows, sum_over_replicas(rows))
        return self._share if isinstance(self._share, tf.Tensor) else self._share.read_value()

    def scale(self, loss: Any) -> Any:
        """The part of the global batch's loss that this replica's mean loss is."""
        self.is_scaled = True
        scaled = tf.math.multiply_no_nan(loss, tf.cast(self.share, loss.dtype))  # the mean of no rows is NaN
        self._scaled.append(scaled)
        return scaled

    def unscale(self, loss: Any) -> Any:
        """The opposite of `scale`; 0 where this replica has no rows."""
        return tf.math.divide_no_nan(loss, tf.cast(self.share, loss.dtype))

    def weight_of(self, counting: Any) -> Any:
        """What a mean over the rows that count here has to be multiplied with, besides `share`: a float32 scalar.

        Args:
            counting: A mask or weights, whose sum says how much of this replica's rows counts.
        """
        local = tf.reduce_sum(tf.cast(counting, tf.float32))
        return self.unscale(tf.math.divide_no_nan(local, sum_over_replicas(local)))

    def made(self, loss: Any) -> bool:
        """True for a tensor that `scale` returned."""
        return any(loss is scaled for scaled in self._scaled)


def current() -> Step | None:
    """The step that this thread is in, if Keras is at a step."""
    return getattr(_local, "step", None)


@contextmanager
def entered(step: Step) -> Iterator[None]:
    """Make this the thread's step."""
    _local.step = step
    try:
        yield
    finally:
        _local.step = None


def stepping(fn: Callable[..., Any], num_replicas: int, stored: Any) -> Callable[..., Any]:
    """What a replica runs instead of a step of Keras's: the same step, with its share of the batch known.

    Args:
        fn: A train_step, test_step or predict_step.
        num_replicas: Model copies over all workers (count).
        stored: A variable to keep the share in. A tf.function inside the step is traced once and may be called from
            several others, so it must not capture a tensor of the first.

    Returns:
        A function of the share (float32 scalar, None if not known), the batch, and what else `fn` takes.
    """
    owner = type(fn.__self__).__name__ if hasattr(fn, "__self__") else "the model"

    def run(share: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        batch = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, batch)
        if share is not None:
            stored.assign(share)
        step = Step(owner, batch, None if share is None else stored, num_replicas)
        with entered(step):
            logs = fn(batch, *args, **kwargs)
        if not isinstance(logs, dict):
            return logs
        # Keras takes the mean of the logs over the replicas: a step that returns its scaled loss means the whole loss.
        return {name: value * num_replicas if step.made(value) else value for name, value in logs.items()}

    return run


def sum_over_replicas(value: Any) -> Any:
    """The sum of a replica's tensor over all replicas, inside of a step."""
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)


def num_rows(batch: Any) -> Any:
    """The rows of a batch: int64 scalar, from its first tensor with rows.

    Raises:
        ValueError: If no tensor of the batch has a first dimension.
    """
    for leaf in tf.nest.flatten(batch):
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.int64)
        if isinstance(leaf, tf.SparseTensor):
            return leaf.dense_shape[0]
        if tf.is_tensor(leaf) and leaf.shape.rank != 0:
            return tf.shape(leaf, tf.int64)[0]
    raise ValueError("the data has no rows: its tensors are scalars; batch the dataset with .batch(global_batch_size)")
