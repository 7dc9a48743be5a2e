"""What a case is, and what all of them are made of.

A case is a function that trains and returns what has to be equal: `result(model, history, ...)`. What is expected of it
is `equal`, `told` (all workers agree, and a notice says what differs) or `refused` (an error of ours before the first
step, whose text contains what is given).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ROWS, FEATURES, BATCH = 192, 8, 48
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    run: Callable[[Any], dict[str, Any]]
    expected: str = "equal"
    text: str = ""
    """Part of the refusal or of the notice."""
    legacy: str | None = None
    """What is expected with tf_keras, if something else; "absent" where tf_keras has no such thing."""
    tolerance: float = TOLERANCE
    notice: str = ""
    """Part of a notice that comes with an equal result."""
    three: bool = False
    """Run on three workers too."""


CASES: dict[str, Case] = {}


def case(expected: str = "equal", text: str = "", name: str = "", **others: Any) -> Callable[[Any], Any]:
    """Add a function to the table, under its own name if no other is given."""

    def add(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        key = name or run.__name__
        assert key not in CASES
        CASES[key] = Case(key, run, expected, text, **others)
        return run

    return add


def data(rows: int = ROWS) -> tuple[Any, Any]:
    """Features, float32 [row, 8], and a label of two classes, int64 [row]."""
    import numpy as np

    x = np.random.RandomState(0).rand(rows, FEATURES).astype("float32")
    return x, (x.sum(axis=1) > FEATURES / 2).astype("int64")


def network(keras: Any, *middle: Any) -> Any:
    """A small classifier with the given layers in its middle."""
    first = keras.layers.Dense(16, activation="tanh")
    return keras.Sequential([keras.Input((FEATURES,)), first, *middle, keras.layers.Dense(2)])


def crossentropy(keras: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(keras: Any, model: Any = None, optimizer: Any = None, loss: Any = None, **compile_args: Any) -> Any:
    """A compiled model, by default a small classifier."""
    model = model or network(keras)
    compile_args.setdefault("metrics", ["accuracy"])
    model.compile(optimizer=optimizer or keras.optimizers.SGD(0.05), loss=loss or crossentropy(keras), **compile_args)
    return model


def train(keras: Any, model: Any = None, optimizer: Any = None, loss: Any = None, **compile_args: Any) -> Any:
    """Compile, fit on arrays for two epochs, and collect the result."""
    model = compiled(keras, model, optimizer, loss, **compile_args)
    return result(model, model.fit(*data(), epochs=2, batch_size=BATCH, verbose=0))


def fit(keras: Any, *args: Any, epochs: int = 2, x: Any = None, **fit_args: Any) -> Any:
    """Fit a small classifier on the given data, and collect the result."""
    model = compiled(keras)
    return result(model, model.fit(*args, epochs=epochs, verbose=0, **fit_args))


def result(model: Any, history: Any, **more: Any) -> dict[str, Any]:
    """What has to be equal: weights, history, and afterwards evaluation and prediction."""
    x, y = data()
    return {
        "weights": model.get_weights(),
        "history": history.history,
        "evaluate": model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True),
        "predict": model.predict(x[:21], batch_size=BATCH, verbose=0),
        **more,
    }


def weights_only(model: Any, **more: Any) -> dict[str, Any]:
    """What has to be equal where there is nothing to evaluate."""
    return {"weights": model.get_weights(), **more}
