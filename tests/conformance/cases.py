"""The conformance cases: each is a small training that is run in one process and on several workers.

A case is a function that trains and returns what has to be equal: `result(model, history, ...)`. What is expected of it
is `equal`, `told` (all workers agree, and a notice says what differs) or `refused` (an error of ours before the first
step, whose text contains what is given).
"""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS, FEATURES, BATCH = 192, 8, 48


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    run: Callable[[Any], dict[str, Any]]
    expected: str = "equal"
    text: str = ""
    """Part of the refusal or of the notice."""


CASES: dict[str, Case] = {}


def case(expected: str = "equal", text: str = "") -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Add a function to the table under its own name."""

    def add(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        CASES[run.__name__] = Case(run.__name__, run, expected, text)
        return run

    return add


def data(rows: int = ROWS) -> tuple[Any, Any]:
    """Features, float32 [row, 8], and a label of two classes, int64 [row]."""
    import numpy as np

    x = np.random.RandomState(0).rand(rows, FEATURES).astype("float32")
    return x, (x.sum(axis=1) > FEATURES / 2).astype("int64")


def network(keras: Any, *middle: Any) -> Any:
    """A small classifier with the given layers in its middle."""
    first = keras.layers.Dense(16, activation="relu")
    return keras.Sequential([keras.Input((FEATURES,)), first, *middle, keras.layers.Dense(2)])


def crossentropy(keras: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train(keras: Any, model: Any, optimizer: Any = "sgd", loss: Any = None, **compile_args: Any) -> dict[str, Any]:
    """Compile, fit on arrays for two epochs, and collect the result."""
    compile_args.setdefault("metrics", ["accuracy"])
    model.compile(optimizer=optimizer, loss=loss or crossentropy(keras), **compile_args)
    return result(model, model.fit(*data(), epochs=2, batch_size=BATCH, verbose=0))


def result(model: Any, history: Any) -> dict[str, Any]:
    """What has to be equal: weights, history, and afterwards evaluation and prediction."""
    x, y = data()
    return {
        "weights": model.get_weights(),
        "history": history.history,
        "evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True),
        "predict": model.predict(x[:20], batch_size=BATCH, verbose=0),
    }


# Optimizers


@case()
def sgd_momentum(keras: Any) -> Any:
    return train(keras, network(keras), keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True))


@case()
def adam(keras: Any) -> Any:
    return train(keras, network(keras), "adam")


@case()
def adamw(keras: Any) -> Any:
    return train(keras, network(keras), keras.optimizers.AdamW(0.01, weight_decay=0.01))


@case()
def rmsprop(keras: Any) -> Any:
    return train(keras, network(keras), "rmsprop")


@case()
def adagrad(keras: Any) -> Any:
    return train(keras, network(keras), "adagrad")


@case()
def learning_rate_schedule(keras: Any) -> Any:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)
    return train(keras, network(keras), keras.optimizers.SGD(schedule))


@case()
def clipnorm(keras: Any) -> Any:
    return train(keras, network(keras), keras.optimizers.SGD(0.1, clipnorm=0.05))


@case()
def global_clipnorm(keras: Any) -> Any:
    return train(keras, network(keras), keras.optimizers.SGD(0.1, global_clipnorm=0.05))


@case()
def clipvalue(keras: Any) -> Any:
    return train(keras, network(keras), keras.optimizers.SGD(0.1, clipvalue=0.005))


@case()
def clipping_with_loss_scaling(keras: Any) -> Any:
    inner = keras.optimizers.SGD(0.1, global_clipnorm=0.05)
    return train(keras, network(keras), keras.optimizers.LossScaleOptimizer(inner))


@case("refused", "gradient_accumulation_steps=2")
def gradient_accumulation(keras: Any) -> Any:
    return train(keras, network(keras), keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


@case("refused", "ema_overwrite_frequency=2")
def ema_overwritten(keras: Any) -> Any:
    return train(keras, network(keras), keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2))


# Losses and metrics


@case()
def loss_by_name(keras: Any) -> Any:
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    return train(keras, model, loss="mse", metrics=["mae"])


@case()
def loss_per_example(keras: Any) -> Any:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    return train(keras, network(keras), loss=loss)


@case()
def scalar_loss_function(keras: Any) -> Any:
    def loss(y_true: Any, y_pred: Any) -> Any:
        each = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return keras.ops.mean(each)

    return train(keras, network(keras), loss=loss)


@case()
def scalar_loss_class(keras: Any) -> Any:
    class Mean(keras.losses.Loss):  # type: ignore[misc]  # Keras is untyped
        def call(self, y_true: Any, y_pred: Any) -> Any:
            each = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
            return keras.ops.mean(each)

    return train(keras, network(keras), loss=Mean())


@case()
def loss_summed(keras: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    return train(keras, network(keras), keras.optimizers.SGD(0.001), loss=loss)


@case()
def regularizers(keras: Any) -> Any:
    layer = keras.layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2", activation="relu")
    return train(keras, network(keras, layer))


@case()
def metric_objects(keras: Any) -> Any:
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, activation="sigmoid")])
    metrics = [keras.metrics.AUC(), keras.metrics.Precision(), keras.metrics.RootMeanSquaredError()]
    return train(keras, model, loss="binary_crossentropy", metrics=metrics)


@case()
def class_weight(keras: Any) -> Any:
    model = network(keras)
    model.compile(optimizer="sgd", loss=crossentropy(keras), metrics=["accuracy"])
    history = model.fit(*data(), epochs=2, batch_size=BATCH, verbose=0, class_weight={0: 1.0, 1: 3.0})
    return result(model, history)


@case()
def sample_weight(keras: Any) -> Any:
    import numpy as np

    model = network(keras)
    model.compile(optimizer="sgd", loss=crossentropy(keras), weighted_metrics=["accuracy"])
    weights = np.linspace(0.1, 2.0, ROWS)
    return result(model, model.fit(*data(), sample_weight=weights, epochs=2, batch_size=BATCH, verbose=0))


# Layers


@case("told", "BatchNormalization normalises the rows of each replica")
def batch_normalization(keras: Any) -> Any:
    return train(keras, network(keras, keras.layers.BatchNormalization()))


@case()
def batch_normalization_synchronized(keras: Any) -> Any:
    return train(keras, network(keras, keras.layers.BatchNormalization(synchronized=True)))


@case()
def lstm(keras: Any) -> Any:
    middle = [keras.layers.Reshape((4, 4)), keras.layers.LSTM(6)]
    return train(keras, network(keras, *middle))


@case()
def embedding(keras: Any) -> Any:
    layers = [keras.layers.Rescaling(9.99), keras.layers.Embedding(10, 4), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(2)])
    return train(keras, model, keras.optimizers.SGD(0.1, global_clipnorm=0.05))


# Data and fit


@case()
def dataset(keras: Any) -> Any:
    import tensorflow as tf

    model = network(keras)
    model.compile(optimizer="sgd", loss=crossentropy(keras), metrics=["accuracy"])
    return result(model, model.fit(tf.data.Dataset.from_tensor_slices(data()).batch(BATCH), epochs=2, verbose=0))


@case()
def dataset_repeated(keras: Any) -> Any:
    import tensorflow as tf

    model = network(keras)
    model.compile(optimizer="sgd", loss=crossentropy(keras), metrics=["accuracy"])
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH).repeat()
    return result(model, model.fit(batches, steps_per_epoch=3, epochs=2, verbose=0))


@case("refused", "AutoShardPolicy.OFF")
def dataset_not_sharded(keras: Any) -> Any:
    import tensorflow as tf

    model = network(keras)
    model.compile(optimizer="sgd", loss=crossentropy(keras))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH).with_options(options)
    return result(model, model.fit(batches, epochs=2, verbose=0))


@case("refused", "x is a Python generator")
def generator(keras: Any) -> Any:
    model = network(keras)
    model.compile(optimizer="sgd", loss=crossentropy(keras))
    x, y = data()
    batches = ((x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, ROWS, BATCH))
    return result(model, model.fit(batches, epochs=1, verbose=0))


@case("told", "leave a batch of 7")
def last_batch_uneven(keras: Any) -> Any:
    model = network(keras)
    model.compile(optimizer="sgd", loss=crossentropy(keras))
    x, y = data(135)
    return result(model, model.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0))


@case()
def validation_and_early_stopping(keras: Any) -> Any:
    model = network(keras)
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss=crossentropy(keras), metrics=["accuracy"])
    callbacks = [keras.callbacks.EarlyStopping(patience=1), keras.callbacks.ReduceLROnPlateau(patience=0)]
    arguments = {"epochs": 6, "batch_size": BATCH, "verbose": 0, "callbacks": callbacks}
    return result(model, model.fit(*data(), validation_data=data(96), **arguments))


@case("refused", "steps_per_execution=3")
def steps_per_execution(keras: Any) -> Any:
    return train(keras, network(keras), steps_per_execution=3)


@case("refused", "jit_compile=True")
def jit_compile(keras: Any) -> Any:
    return train(keras, network(keras), jit_compile=True)


@case()
def run_eagerly(keras: Any) -> Any:
    return train(keras, network(keras), run_eagerly=True)


def run_cases(folder: str, names: list[str]) -> None:
    """Run cases one after another in this process, which may be a worker, and leave each one's outcome in a file."""
    import keras

    from dbx_tf import get_context

    index = get_context().worker_index
    for name in names:
        keras.utils.set_random_seed(1)
        try:
            outcome: dict[str, Any] = CASES[name].run(keras)
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        Path(folder, f"{name}.{index}.pkl").write_bytes(pickle.dumps(outcome))


FIXED = (
    "clipnorm",
    "global_clipnorm",
    "clipvalue",
    "clipping_with_loss_scaling",
    "scalar_loss_function",
    "scalar_loss_class",
    "batch_normalization",
)
"""Cases that Keras gets wrong by itself."""


def run_cases_without_fixes(folder: str, names: list[str]) -> None:
    """Run cases with Keras as it was before dbx_tf's fixes; only inside a run."""
    import keras
    from keras.src.losses import loss as losses

    from dbx_tf.worker import keras_fixes

    optimizer = keras.optimizers.Optimizer
    for name in ("_clip_gradients", "_all_reduce_sum_gradients"):
        setattr(optimizer, name, getattr(optimizer, name).__wrapped__)
    losses.reduce_values = losses.reduce_values.__wrapped__
    keras_fixes._averaging = lambda strategy, variables: lambda: None
    run_cases(folder, names)
