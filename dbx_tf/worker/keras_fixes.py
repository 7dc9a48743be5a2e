"""One small, named fix per defect of Keras on several workers, each with the test that shows it is still needed.

Runs on: workers, in the training process.
"""

from __future__ import annotations

from collections.abc import Callable
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

    Needed as long as `test_the_logged_model_predicts_as_the_trained_one[True-...]` fails without it.

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


def _normalizers(keras: Any, model: Any) -> list[Any]:
    """All BatchNormalization layers of a model, nested ones included."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


def _tensorflow_variable(variable: Any) -> Any:
    """The tf.Variable of a Keras 3 variable; tf_keras has them as they are."""
    return variable if isinstance(variable, tf.Variable) else variable.value
