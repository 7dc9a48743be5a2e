"""Callbacks that keep the workers of a Keras fit together: one model, one end, files written once.

Runs on: workers, in the training process, on all of them alike.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import tensorflow as tf

from dbx_tf.errors import ConfigError

_PLAIN_BATCH_NORMALIZATION: Final = (
    "BatchNormalization normalises the rows of each replica by themselves, as TensorFlow defines it, so results differ "
    "a little from one machine's; BatchNormalization(synchronized=True) uses all rows of the global batch and gives "
    "the same numbers; the moving statistics are averaged over the workers"
)
_BATCH_HOOKS: Final = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


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
            self._average: Callable[[], None] | None = None

        def on_test_begin(self, logs: Any = None) -> None:
            """Evaluate one model, not one per worker."""
            self._bring_together()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            """Let callbacks that save or export find the averaged model."""
            self._bring_together()

        def _bring_together(self) -> None:
            if self._average is None:
                # Not before the first step: some models are built by it.
                layers = _normalizers(keras, self.model)
                if any(not getattr(layer, "synchronized", False) for layer in layers):
                    tell(_PLAIN_BATCH_NORMALIZATION)
                variables = [_tensorflow_variable(v) for layer in layers for v in layer.non_trainable_variables]
                self._average = _averaging(strategy, variables) if variables else lambda: None
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


def stay_together(keras: Any, strategy: Any, callbacks: list[Any], tell: Callable[[str], None]) -> Any:
    """A callback, to run after all others, with which all workers stop when one does, and find out if they differ.

    What the other callbacks see is the same on all workers, but what they do with it need not be: a random choice, a
    clock or a file of one server would leave workers waiting for ever for one that has stopped, or train models that
    drift apart.

    Args:
        keras: The module `keras` or `tf_keras`.
        strategy: The run's strategy.
        callbacks: The user's callbacks. If one of them, not of Keras's own, follows every batch, so does this.
        tell: Called with a plain sentence for what is only told.
    """
    follows_batches = any(_follows_batches(keras, callback) for callback in callbacks)

    class StayTogether(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
        def on_train_begin(self, logs: Any = None) -> None:
            """See that all workers begin in the same epoch with the same weights."""
            _check_metrics(strategy, self.model, tell)
            start = gathered(strategy, [getattr(self.model, "_initial_epoch", None) or 0])
            if len({epoch for (epoch,) in start}) > 1:
                epochs = ", ".join(f"worker {index}: epoch {epoch}" for index, (epoch,) in enumerate(start))
                raise ConfigError(
                    f"a callback has restored different states on the workers ({epochs}); give it a folder that all "
                    "workers see, such as one in /Volumes"
                )
            self._check_weights()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            """Stop where any worker stops."""
            if follows_batches:
                self._agree_on_the_end()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            """Stop where any worker stops, and see that all have the same weights."""
            self._agree_on_the_end()
            self._check_weights()
            _check_metrics(strategy, self.model, tell)  # tf_keras has them after the first step

        def _agree_on_the_end(self) -> None:
            stops = gathered(strategy, [int(bool(self.model.stop_training))])
            if any(stop for (stop,) in stops):
                self.model.stop_training = True

        def _check_weights(self) -> None:
            sums = gathered(strategy, [_checksum(self.model.trainable_variables if self.model.built else [])])
            odd = [index for index, value in enumerate(sums) if value != sums[0]]
            if odd:
                raise ConfigError(
                    f"the weights of worker {odd[0]} are no longer those of worker 0: something in train_fn, such as a "
                    "callback that sets weights or the learning rate, acts differently on each worker; make it depend "
                    "only on what all workers know alike"
                )

    return StayTogether()


def write_once(keras: Any, callbacks: list[Any], scratch_dir: Path) -> None:
    """Let workers other than the chief write what TensorBoard and CSVLogger write into their scratch folder.

    All of them would write the same to the same path, if they share it. Models and weights are saved by all, see
    `worker.saving`: each server may have to find them again.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger):
            callback.filename = str(scratch_dir / "csv_logger.csv")
        elif isinstance(callback, keras.callbacks.TensorBoard):
            callback.log_dir = str(scratch_dir / "tensorboard")
        elif isinstance(callback, keras.callbacks.BackupAndRestore):
            callback.delete_checkpoint = False  # the chief removes it


def gathered(strategy: Any, values: list[int]) -> list[list[int]]:
    """The values (64-bit integers) of every worker, in their order; all workers have to call it."""
    per_replica: list[list[int]] = _gathering(strategy)(tf.constant(values, tf.int64)).numpy().tolist()
    return per_replica[:: len(strategy.extended.worker_devices)]


@functools.cache
def _gathering(strategy: Any) -> Any:
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])  # type: ignore[untyped-decorator]  # as above
    def gather(values: Any) -> Any:
        def each() -> Any:
            return tf.distribute.get_replica_context().all_gather(values[None], axis=0)

        return strategy.experimental_local_results(strategy.run(each))[0]

    return gather


def _check_metrics(strategy: Any, model: Any, tell: Callable[[str], None]) -> None:
    for metric in (own for group in model.metrics for own in (getattr(group, "metrics", None) or [group])):
        if not all(strategy.extended.variable_created_in_scope(_tensorflow_variable(v)) for v in metric.variables):
            raise ConfigError(
                f"the metric {metric.name} was made outside of the strategy's scope, so every worker would report its "
                "own value; make it in train_fn itself, not in a thread or under another strategy"
            )
        if not _is_of_keras(metric):
            tell(
                f"the metric {metric.name} is a class of your own: its variables are summed over the workers, so they "
                "have to be sums and counts; a maximum, for example, would be the sum of each worker's maximum"
            )


def _is_of_keras(value: Any) -> bool:
    return type(value).__module__.startswith(("keras.", "tf_keras."))


def _follows_batches(keras: Any, callback: Any) -> bool:
    cls = type(callback)
    is_lambda = isinstance(callback, keras.callbacks.LambdaCallback)
    if _is_of_keras(callback) and not is_lambda:
        return False  # they decide by the logs, which are the same everywhere
    base = keras.callbacks.Callback
    return any(hook in vars(callback) or getattr(cls, hook, None) is not getattr(base, hook) for hook in _BATCH_HOOKS)


def _checksum(variables: list[Any]) -> int:
    value = 0
    for variable in variables:
        value = zlib.crc32(variable.numpy().tobytes(), value)
    return value


def _normalizers(keras: Any, model: Any) -> list[Any]:
    """All BatchNormalization layers of a model, nested ones included."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


def _tensorflow_variable(variable: Any) -> Any:
    """The tf.Variable of a Keras 3 variable; tf_keras has them as they are."""
    return variable if isinstance(variable, tf.Variable) else variable.value
