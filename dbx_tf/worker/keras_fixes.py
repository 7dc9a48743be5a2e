"""One small, named fix per defect of Keras on several workers, each with the test that shows it is still needed.

Runs on: workers, in the training process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import tensorflow as tf

_PLAIN_BATCH_NORMALIZATION: Final = (
    "BatchNormalization normalises the rows of each replica by themselves, as TensorFlow defines it, so results differ "
    "a little from one machine's; BatchNormalization(synchronized=True) uses all rows of the global batch and gives "
    "the same numbers; the moving statistics are averaged over the workers"
)


def average_statistics(keras: Any, strategy: Any, tell: Callable[[str], None]) -> Any:
    """A callback that keeps BatchNormalization's moving statistics the same on all workers.

    Each worker updates them from its own rows. Keras 3 (3.15.1, layers/normalization/batch_normalization.py) never
    brings them together; tf_keras (2.21, the same file) does on saving, but evaluates and predicts with a worker's own.
    Either way the model that is measured depends on the worker, and is not the one that is saved. Averaged before each
    evaluation and at the end of each epoch, there is one model.

    Needed as long as `test_a_fix_is_still_needed[batch_normalization]` passes.

    Args:
        keras: The module `keras` or `tf_keras`.
        strategy: The run's strategy.
        tell: Called with a plain sentence when a model has such statistics.
    """

    class AverageStatistics(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
        def on_train_begin(self, logs: Any = None) -> None:
            """Find the statistics; a model that is built by its first batch has them by now."""
            layers = _normalizers(keras, self.model)
            if any(not getattr(layer, "synchronized", False) for layer in layers):
                tell(_PLAIN_BATCH_NORMALIZATION)
            variables = [_tensorflow_variable(v) for layer in layers for v in layer.non_trainable_variables]
            self._average = _averaging(strategy, variables) if variables else lambda: None

        def on_test_begin(self, logs: Any = None) -> None:
            """Evaluate one model, not one per worker."""
            self._average()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            """Let callbacks that save or export find the averaged model."""
            self._average()

    return AverageStatistics()


def _averaging(strategy: Any, variables: list[Any]) -> Callable[[], None]:
    """A function that sets each worker's variables to their mean over the workers, which all have to call it."""

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def means() -> Any:
        local = strategy.run(lambda: [tf.identity(variable) for variable in variables])
        return [strategy.reduce("MEAN", value, axis=None) for value in local]

    def average() -> None:
        for variable, mean in zip(variables, means(), strict=True):
            variable.assign(mean)

    return average


@contextmanager
def clipped_after_reduction(keras: Any) -> Iterator[None]:
    """Clip the gradients of the global batch, not each worker's part of them.

    Keras 3 (3.15.1, optimizers/base_optimizer.py and backend/tensorflow/optimizer.py) clips before it sums gradients
    over the replicas, so that clipnorm, clipvalue and global_clipnorm mean something else on several workers.

    Needed as long as `test_a_fix_is_still_needed[clipnorm]` and its like pass.
    """
    optimizer = keras.optimizers.Optimizer
    clip, reduce = optimizer._clip_gradients, optimizer._all_reduce_sum_gradients

    @functools.wraps(clip)
    def clip_sum(self: Any, grads: list[Any]) -> Any:
        if not (self.clipnorm or self.clipvalue or self.global_clipnorm):
            return clip(self, grads)
        self.__dict__["_dbx_tf_is_reduced"] = True
        return clip(self, [grad for grad, _ in reduce(self, [(grad, None) for grad in grads])])

    @functools.wraps(reduce)
    def reduce_once(self: Any, grads_and_vars: list[Any]) -> Any:
        return grads_and_vars if self.__dict__.pop("_dbx_tf_is_reduced", False) else reduce(self, grads_and_vars)

    optimizer._clip_gradients, optimizer._all_reduce_sum_gradients = clip_sum, reduce_once
    try:
        yield
    finally:
        optimizer._clip_gradients, optimizer._all_reduce_sum_gradients = clip, reduce


@contextmanager
def scaled_scalar_losses() -> Iterator[None]:
    """Divide a loss that comes as a scalar by the number of replicas, as Keras does with every other loss.

    Keras 3 (3.15.1, losses/loss.py) passes a scalar on as it is; since gradients are summed over the replicas, a loss
    function that takes the mean itself would train with n times the gradient and report n times the loss.

    Needed as long as `test_a_fix_is_still_needed[scalar_loss_function]` and its like pass.
    """
    from keras.src.losses import loss as losses

    original = losses.reduce_values

    @functools.wraps(original)
    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        reduced = original(values, sample_weight, reduction)
        is_mean = reduction in ("sum_over_batch_size", "mean", "mean_with_sample_weight")
        return losses.scale_loss_for_distribution(reduced) if is_mean and tuple(values.shape) == () else reduced

    losses.reduce_values = reduce_values
    try:
        yield
    finally:
        losses.reduce_values = original


def _normalizers(keras: Any, model: Any) -> list[Any]:
    """All BatchNormalization layers of a model, nested ones included."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


def _tensorflow_variable(variable: Any) -> Any:
    """The tf.Variable of a Keras 3 variable; tf_keras has them as they are."""
    return variable if isinstance(variable, tf.Variable) else variable.value
