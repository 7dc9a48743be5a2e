"""Every optimizer that Keras ships, and what can be set on them."""

from typing import Any

from .table import BATCH, CASES, Case, case, compiled, data, network, train

_PLAIN = {
    "SGD": {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"learning_rate": 0.01},
    "Adam": {"learning_rate": 0.01},
    "AdamW": {"learning_rate": 0.01, "weight_decay": 0.01},
    "Adadelta": {"learning_rate": 1.0},
    "Adagrad": {"learning_rate": 0.05},
    "Adamax": {"learning_rate": 0.01},
    "Adafactor": {"learning_rate": 0.01},
    "Nadam": {"learning_rate": 0.01},
    "Ftrl": {"learning_rate": 0.05},
    "Lion": {"learning_rate": 0.001},
    "Lamb": {"learning_rate": 0.01},
    "Muon": {"learning_rate": 0.01},
}
_NOT_IN_TF_KERAS = ("Lamb", "Muon")


def _case(name: str, arguments: dict[str, Any]) -> Case:
    def run(keras: Any) -> Any:
        return train(keras, optimizer=getattr(keras.optimizers, name)(**arguments))

    return Case(name.lower(), run, legacy="absent" if name in _NOT_IN_TF_KERAS else None)


for _name, _arguments in _PLAIN.items():
    CASES[_name.lower()] = _case(_name, _arguments)


@case()
def sgd_with_weight_decay(keras: Any) -> Any:
    return train(keras, optimizer=keras.optimizers.SGD(0.05, weight_decay=0.01))


@case()
def exponential_decay(keras: Any) -> Any:
    return train(keras, optimizer=keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)))


@case()
def cosine_decay_with_warmup(keras: Any) -> Any:
    schedule = keras.optimizers.schedules.CosineDecay(0.0, 6, warmup_target=0.1, warmup_steps=3)
    return train(keras, optimizer=keras.optimizers.Adam(schedule))


@case()
def clipnorm(keras: Any) -> Any:
    return train(keras, optimizer=keras.optimizers.SGD(0.1, clipnorm=0.05))


@case(three=True)
def global_clipnorm(keras: Any) -> Any:
    return train(keras, optimizer=keras.optimizers.SGD(0.1, global_clipnorm=0.05))


@case()
def clipvalue(keras: Any) -> Any:
    return train(keras, optimizer=keras.optimizers.SGD(0.1, clipvalue=0.005))


@case(legacy="absent")
def clipping_with_loss_scaling(keras: Any) -> Any:
    inner = keras.optimizers.SGD(0.1, global_clipnorm=0.05)
    return train(keras, optimizer=keras.optimizers.LossScaleOptimizer(inner))


@case()
def moving_average(keras: Any) -> Any:
    return train(keras, optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))


@case("refused", "ema_overwrite_frequency=2", legacy="equal")
def moving_average_overwritten(keras: Any) -> Any:
    return train(keras, optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2))


@case("refused", "gradient_accumulation_steps=2", legacy="absent")
def gradient_accumulation(keras: Any) -> Any:
    return train(keras, optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


def _mixed(keras: Any, policy: str) -> Any:
    hidden = keras.layers.Dense(8, activation="tanh", dtype=policy)
    return train(keras, network(keras, hidden), keras.optimizers.SGD(0.05))


@case(tolerance=1e-3)
def mixed_float16(keras: Any) -> Any:
    return _mixed(keras, "mixed_float16")


@case(tolerance=5e-3)
def mixed_bfloat16(keras: Any) -> Any:
    return _mixed(keras, "mixed_bfloat16")


@case(tolerance=1e-2)
def mixed_float16_everywhere(keras: Any) -> Any:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return train(keras)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@case(tolerance=1e-3, three=True)
def loss_scaling_with_an_overflow_on_one_worker(keras: Any) -> Any:
    """The step is left out on all workers, and the scale halved."""
    hidden = keras.layers.Dense(8, activation="relu", dtype="mixed_float16")
    inner = keras.optimizers.SGD(0.05)
    make = keras.mixed_precision.LossScaleOptimizer if keras.__name__ == "tf_keras" else None
    optimizer = make(inner) if make else keras.optimizers.LossScaleOptimizer(inner)
    model = compiled(keras, network(keras, hidden), optimizer)
    x, y = data()
    x[BATCH - 1] = 3e4
    history = model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    return {"weights": model.get_weights(), "accuracy": history.history["accuracy"]}
