"""Gives every replica its rows of each global batch, the same batches as on one machine.

Runs on: workers, in the training process. Every worker reads the same batches and takes its part of each, so that all
of them come to the end at the same step without asking each other, which TensorFlow does at every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import tensorflow as tf

from dbx_tf.worker.step import num_rows

_END: Final = -1.0  # the share in a part that only says that there are no more


class Part(NamedTuple):
    """A replica's rows of a global batch."""

    share: Any
    """Rows here over rows of the global batch: float32 scalar."""
    batch: Any


class GlobalBatches:
    """A dataset of global batches as Keras 3 iterates over it on several workers."""

    def __init__(self, strategy: Any, dataset: Any, worker_index: int, num_workers: int) -> None:
        self._num_batches: float | None = None
        parts = split(strategy, dataset, worker_index, num_workers)
        cardinality = int(dataset.cardinality())
        if cardinality == tf.data.INFINITE_CARDINALITY:
            self._num_batches = math.inf
        elif all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(dataset.element_spec)):
            self._num_batches = cardinality if cardinality >= 0 else None
            # Of a dataset without an end TensorFlow does not ask all workers at each step whether they have come to it.
            parts = parts.concatenate(_end_of(parts).repeat())
        self._distributed = strategy.distribute_datasets_from_function(lambda _: parts)
        self._spec = dataset.element_spec

    def example(self) -> Any:
        """A batch of zeros with the shapes and dtypes of the dataset's, or None if only reading it can tell them."""
        leaves = tf.nest.flatten(self._spec)
        if not all(isinstance(leaf, tf.TensorSpec) and leaf.shape[1:].is_fully_defined() for leaf in leaves):
            return None
        return tf.nest.map_structure(
            lambda leaf: tf.zeros([leaf.shape[0] or 1, *leaf.shape[1:]], leaf.dtype), self._spec
        )

    def __iter__(self) -> Iterator[Any]:
        return BatchIterator(self._distributed, self._num_batches)


class BatchIterator:
    """Takes the parts of global batches, to the end of the dataset."""

    def __init__(self, parts: Any, num_left: float | None) -> None:
        self.distributed = iter(parts)
        """TensorFlow's iterator over this worker's parts; it may go on after the end."""
        self._num_left = num_left

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next part, as values per replica."""
        if self._num_left == 0:
            raise StopIteration
        part = next(self.distributed)
        if self._num_left is not None:
            self._num_left -= 1
        elif float(tf.distribute.get_strategy().experimental_local_results(part.share)[0]) == _END:
            raise StopIteration
        return part

    def claim(self, num_steps: int) -> int | None:
        """Take up to this many steps at once from `distributed`; None if it can't be known how many there are."""
        if self._num_left is None:
            return None
        claimed = int(min(num_steps, self._num_left))
        self._num_left -= claimed
        return claimed


def split(strategy: Any, dataset: Any, worker_index: int, num_workers: int) -> Any:
    """A dataset of this worker's parts: for each global batch, one for each of its replicas in turn."""
    num_local = strategy.num_replicas_in_sync // num_workers
    spec = dataset.element_spec

    def part(local_index: Any, *element: Any) -> Part:
        batch = element if isinstance(spec, tuple) else element[0]
        # The order in which Keras puts the replicas' predictions together again.
        index = tf.cast(local_index, tf.int64) * num_workers + worker_index
        total = num_rows(batch)
        start, stop = (total * position // (num_local * num_workers) for position in (index, index + 1))
        share = tf.cast(stop - start, tf.float32) / tf.cast(total, tf.float32)
        rows = tf.nest.map_structure(lambda leaf: _rows(leaf, start, stop), batch)
        return Part(share, rows)

    if num_local == 1:
        return dataset.map(lambda *element: part(0, *element), num_parallel_calls=tf.data.AUTOTUNE).prefetch(1)

    def each(*element: Any) -> Any:
        return tf.data.Dataset.range(num_local).map(lambda local_index: part(local_index, *element))

    return dataset.flat_map(each).prefetch(num_local)


def _rows(leaf: Any, start: Any, stop: Any) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        rest = leaf.dense_shape[1:]
        first, size = tf.concat([[start], tf.zeros_like(rest)], 0), tf.concat([[stop - start], rest], 0)
        return tf.sparse.slice(leaf, first, size)
    has_rows = isinstance(leaf, tf.RaggedTensor) or (tf.is_tensor(leaf) and leaf.shape.rank != 0)
    return leaf[start:stop] if has_rows else leaf


def _end_of(parts: Any) -> Any:
    spec = parts.element_spec.batch
    zeros = tf.nest.map_structure(lambda leaf: tf.zeros([size or 0 for size in leaf.shape], leaf.dtype), spec)
    return tf.data.Dataset.from_tensors(Part(tf.constant(_END), zeros))
