"""How Keras 3 goes through an epoch on several workers: one step after another, or many in one execution.

Runs on: workers, in the training process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from dbx_tf.worker.global_batch import BatchIterator, GlobalBatches
from dbx_tf.worker.step import num_rows


@contextmanager
def replaced(keras: Any) -> Iterator[None]:
    """Let models train and evaluate in this module's loop.

    Keras 3 (3.15.1, backend/tensorflow/trainer.py) asks for the next batch as an optional inside of the step, which
    costs a round over all workers each time, and runs several steps per execution in a tf.cond inside of a
    tf.while_loop, which TensorFlow 2.21 can't do with collectives.
    """
    model = keras.Model
    originals = {
        name: getattr(model, name)
        for name in ("make_train_function", "make_test_function", "predict_on_batch", "_maybe_symbolic_build")
    }

    @functools.wraps(originals["make_train_function"])
    def make_train_function(self: Any, force: bool = False) -> Any:
        if self.train_function is None or force:
            self.train_function = _executing(self, self.train_step)
        return self.train_function

    @functools.wraps(originals["make_test_function"])
    def make_test_function(self: Any, force: bool = False) -> Any:
        if self.test_function is None or force:
            self.test_function = _executing(self, self.test_step)
        return self.test_function

    @functools.wraps(originals["predict_on_batch"])
    def predict_on_batch(self: Any, x: Any) -> Any:
        # Keras gives each replica the whole batch and returns it as often.
        return self.predict(x, batch_size=int(num_rows(tf.nest.map_structure(tf.convert_to_tensor, x))), verbose=0)

    @functools.wraps(originals["_maybe_symbolic_build"])
    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        # Keras reads a batch to learn its shapes: a shuffle would go on from there, and a generator has lost it.
        batches = getattr(iterator, "_distributed_dataset", None)
        example = batches.example() if isinstance(batches, GlobalBatches) else None
        if example is None:
            originals["_maybe_symbolic_build"](self, iterator, data_batch)
        else:
            originals["_maybe_symbolic_build"](self, data_batch=example)

    replacements = (make_train_function, make_test_function, predict_on_batch, build)
    for name, replacement in zip(originals, replacements, strict=True):
        setattr(model, name, replacement)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(model, name, original)


def _executing(model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that takes an iterator through one execution and returns the logs of its last step.

    It raises StopIteration if there is no batch left.
    """
    one, many = _functions(model, step)

    def execute(iterator: Any) -> Any:
        num_steps = model.steps_per_execution
        can_loop = num_steps > 1 and isinstance(iterator, BatchIterator) and not model.run_eagerly
        claimed = iterator.claim(num_steps) if can_loop else None
        if claimed:
            return many(iterator.distributed, tf.constant(claimed))
        logs = one(next(iterator))
        for _, data in zip(range(num_steps - 1), iterator, strict=False):
            logs = one(data)
        return logs

    return execute


def _functions(model: Any, step: Callable[[Any], Any]) -> tuple[Any, Any]:
    """A step on given data, and several on an iterator: each returns the logs of the last."""
    strategy = model.distribute_strategy

    def run(data: Any) -> Any:
        return strategy.run(step, args=(data,))

    def reduced(logs: Any) -> Any:
        return tf.nest.map_structure(lambda value: strategy.reduce("MEAN", value, axis=None), logs)

    def one(data: Any) -> Any:
        return reduced(run(data))

    def many(iterator: Any, num_steps: Any) -> Any:
        def body(index: Any) -> Any:
            run(next(iterator))
            return (index + 1,)

        tf.while_loop(lambda index: index < num_steps - 1, body, (0,))
        return one(next(iterator))

    if model.run_eagerly:
        return one, many
    plain = tf.autograph.experimental.do_not_convert  # as in Keras
    run = tf.function(plain(run), reduce_retracing=True, jit_compile=model.jit_compile)
    one = tf.function(plain(one), reduce_retracing=True)
    return one, tf.function(plain(many), reduce_retracing=True)
