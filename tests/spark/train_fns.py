"""The train_fns of the Spark tests: ordinary user code. This module is not installed, so it travels by value."""

import os
import signal
from typing import Any


def make_data(rows: int = 192) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.RandomState(0)
    x = rng.rand(rows, 8).astype("float32")
    return x, (x.sum(axis=1) > 4).astype("int64")


def make_model(tf: Any) -> Any:
    layers = tf.keras.layers
    model = tf.keras.Sequential([tf.keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(2)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=tf.keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])
    return model


def fit_and_return_weights(epochs: int = 2, batch_size: int = 48) -> dict[str, Any]:
    """Train with numpy data that Keras shuffles; return what an equal training has to have equal."""
    import tensorflow as tf

    tf.keras.utils.set_random_seed(1)
    x, y = make_data()
    model = make_model(tf)
    history = model.fit(x, y, epochs=epochs, batch_size=batch_size, verbose=2, validation_data=(x[:64], y[:64]))
    return {"weights": model.get_weights(), "history": history.history, "keras": type(model).__module__.split(".")[0]}


def fit_and_return_model(batch_norm: bool = False) -> Any:
    """Train and return the model with its predictions."""
    import tensorflow as tf

    x, y = make_data()
    model = make_model(tf)
    if batch_norm:
        model = tf.keras.Sequential([tf.keras.Input((8,)), tf.keras.layers.BatchNormalization(), *model.layers])
        model.compile(optimizer="sgd", loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, epochs=1, batch_size=48, verbose=0)
    return model, model.predict(x[:10], verbose=0)


def no_training() -> dict[str, Any]:
    """Look around in the training process."""
    from dbx_tf import get_context

    context = get_context()
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "worker_index": context.worker_index,
        "num_workers": context.num_workers,
        "num_replicas": context.num_replicas,
        "is_chief": context.is_chief,
        "per_replica": context.per_replica_batch_size(64),
        "scratch": str(context.scratch_dir),
        "scratch_exists": context.scratch_dir.is_dir(),
        "strategy": type(context.strategy).__mro__[1].__name__,
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def own_loop() -> dict[str, list[float]]:
    """A loop without Keras's fit, which logs and returns its metrics."""
    from dbx_tf import get_context

    for step in range(3):
        get_context().log_metric("own", 10.0 + step, step)
    return {"loss": [3.0, 2.0, 1.0]}


def fail_on(worker_index: int, how: str) -> float:
    """Train, and have one worker fail in the middle in the given way."""
    import tensorflow as tf

    from dbx_tf import get_context

    class Failing(tf.keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and get_context().worker_index == worker_index:
                print(f"about to fail by {how}")
                if how == "raise":
                    raise ValueError("user bug")
                if how == "exit":
                    os._exit(3)
                os.kill(os.getpid(), getattr(signal, how))

    x, y = make_data()
    model = make_model(tf)
    model.fit(x, y, epochs=200, batch_size=48, verbose=0, callbacks=[Failing()])
    return 1.0


def fit_twice_a_model_that_cannot_be_saved() -> None:
    """Fit a subclassed model on a dict of arrays, then on a dataset; its config can't be told."""
    import tensorflow as tf

    class Unsavable(tf.keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.dense = tf.keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.dense(inputs["x"])

        def get_config(self) -> Any:
            raise NotImplementedError("no config")

    x, y = make_data()
    model = Unsavable()
    model.compile(optimizer="sgd", loss="mse")
    model.fit({"x": x}, y, epochs=2, batch_size=48, verbose=0)
    model.fit(tf.data.Dataset.from_tensor_slices(({"x": x}, y)).batch(48).prefetch(1), epochs=1, verbose=0)


def return_a_generator() -> Any:
    """Train, then return what can't be pickled."""
    fit_and_return_weights(epochs=1)
    return (number for number in range(3))


def train_for_ever() -> None:
    """Train until somebody ends it."""
    import tensorflow as tf

    x, y = make_data()
    make_model(tf).fit(x, y, epochs=1_000_000, batch_size=48, verbose=0)


def log_with_mlflow() -> str:
    """User code that logs by itself, in the ways people do."""
    import mlflow
    import tensorflow as tf

    from dbx_tf import get_context

    mlflow.set_experiment("an experiment of the user's")
    with mlflow.start_run(run_name="mine"):
        mlflow.log_param("who", get_context().worker_index)
        mlflow.log_metric("mine", 7.0, step=3)
        mlflow.log_metrics({"tensor": float(tf.constant(2.0))})
        mlflow.set_tag("colour", "blue")
        mlflow.log_text("hello", "notes/hello.txt")
        run_id = mlflow.active_run().info.run_id
    mlflow.log_metric("after", 1.0)
    return str(run_id)
