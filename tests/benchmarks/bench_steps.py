"""What a step costs in fit on two workers, against the same step in a bare loop.

All variants run in one pair of training processes, one after another in each round, so that other load hits them alike.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from dbx_tf import Runner, Tracking

ROUNDS, STEPS, BATCH = 5, 60, 64


def section() -> str:
    """The measurement as Markdown."""
    runner = Runner(num_slots=2, local_mode=True, tracking=Tracking(enabled=False))
    seconds = runner.run(measure).value
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    base = medians["bare loop"]
    rows = "".join(f"| {name} | {median * 1000:.1f} | {median / base:.2f} |\n" for name, median in medians.items())
    return (
        "## A step\n\nTwo workers of one machine, a network of one convolution on 28x28 images, Keras 3, "
        f"global batch {BATCH}; medians of {ROUNDS} rounds of {STEPS} steps.\n\n"
        f"| | ms per step | ratio |\n|---|---|---|\n{rows}"
    )


def measure() -> dict[str, list[float]]:
    """Seconds per step of each variant and round; runs as train_fn."""
    variants: dict[str, Callable[[], None]] = {
        "bare loop": bare_loop(),
        "fit": fit(1),
        "fit, steps_per_execution=10": fit(10),
        "fit on a dataset of unknown length": fit(1, is_known=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(ROUNDS + 1):
        for name, run in variants.items():
            started = time.monotonic()
            run()
            if number:  # the first round traces
                seconds[name].append((time.monotonic() - started) / STEPS)
    return seconds


def network() -> Any:
    """A small convolutional network for ten classes."""
    import keras

    layers = [keras.layers.Conv2D(32, 3, activation="relu"), keras.layers.MaxPooling2D(), keras.layers.Flatten()]
    layers += [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((28, 28, 1)), *layers])


def images() -> Any:
    """A dataset of as many batches as there are steps."""
    import numpy as np
    import tensorflow as tf

    random = np.random.RandomState(0)
    x, y = random.rand(STEPS * BATCH, 28, 28, 1).astype("float32"), random.randint(0, 10, STEPS * BATCH)
    return tf.data.Dataset.from_tensor_slices((x, y)).cache().batch(BATCH)


def fit(steps_per_execution: int, *, is_known: bool = True) -> Callable[[], None]:
    """One epoch of fit."""
    import keras

    model = network()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], steps_per_execution=steps_per_execution)
    batches = images() if is_known else images().filter(lambda x, y: True)
    return lambda: model.fit(batches, epochs=1, verbose=0)


def bare_loop() -> Callable[[], None]:
    """The same steps without Keras's loop, metrics and logs: what there is at least."""
    import keras
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    model, optimizer = network(), keras.optimizers.SGD()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    iterator = iter(strategy.experimental_distribute_dataset(images().repeat()))

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            average = tf.nn.compute_average_loss(loss(y, model(x, training=True)), global_batch_size=BATCH)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(average, variables), variables, strict=True))

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def train_step(iterator: Any) -> None:
        strategy.run(step, args=next(iterator))

    def run() -> None:
        for _ in range(STEPS):
            train_step(iterator)

    return run
