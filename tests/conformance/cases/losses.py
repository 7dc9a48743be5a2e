"""Losses by name, class and function, their reductions and weights."""

from typing import Any

from .table import BATCH, FEATURES, ROWS, case, compiled, crossentropy, data, network, result, train, weights_only


def _heads(keras: Any, *names: str, activation: str = "sigmoid") -> Any:
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    return keras.Model(
        inputs, {name: keras.layers.Dense(1, activation=activation, name=name)(hidden) for name in names}
    )


@case()
def losses_by_name(keras: Any) -> Any:
    names = ["mse", "mae", "huber", "log_cosh", "poisson", "hinge", "binary_crossentropy", "binary_focal_crossentropy"]
    names += ["mean_squared_logarithmic_error", "kl_divergence"]
    x, y = data()
    model = _heads(keras, *names)
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss={name: name for name in names})
    history = model.fit(x, dict.fromkeys(names, y.astype("float32")), epochs=2, batch_size=BATCH, verbose=0)
    return weights_only(model, history=history.history)


@case(three=True)
def loss_per_row(keras: Any) -> Any:
    def loss(y_true: Any, y_pred: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    return train(keras, loss=loss)


def _mean_loss(keras: Any) -> Any:
    import tensorflow as tf

    def loss(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))

    return loss


@case()
def loss_function_of_a_scalar(keras: Any) -> Any:
    return train(keras, loss=_mean_loss(keras))


@case(three=True)
def loss_function_of_a_scalar_last_batch(keras: Any) -> Any:
    model = compiled(keras, loss=_mean_loss(keras))
    return result(model, model.fit(*data(131), epochs=2, batch_size=BATCH, verbose=0))


@case()
def loss_class_of_a_scalar(keras: Any) -> Any:
    function = _mean_loss(keras)

    class Mean(keras.losses.Loss):  # type: ignore[misc]  # Keras is untyped
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return function(y_true, y_pred)

    return train(keras, loss=Mean())


@case()
def loss_summed(keras: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    return train(keras, optimizer=keras.optimizers.SGD(0.001), loss=loss)


@case()
def loss_summed_last_batch(keras: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model = compiled(keras, optimizer=keras.optimizers.SGD(0.001), loss=loss)
    return result(model, model.fit(*data(131), epochs=2, batch_size=BATCH, verbose=0))


@case()
def loss_not_reduced(keras: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    model = compiled(keras, optimizer=keras.optimizers.SGD(0.001), loss=loss)
    history = model.fit(*data(), epochs=2, batch_size=BATCH, verbose=0)
    return weights_only(model, history=history.history)


@case(legacy="absent")
def loss_mean_with_sample_weight(keras: Any) -> Any:
    import numpy as np

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    model = compiled(keras, loss=loss)
    weights = np.linspace(0.1, 2.0, ROWS)
    return result(model, model.fit(*data(), sample_weight=weights, epochs=2, batch_size=BATCH, verbose=0))


@case()
def regularizers(keras: Any) -> Any:
    layer = keras.layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l2", activation="tanh")
    return train(keras, network(keras, layer))


@case()
def regularizers_last_batch(keras: Any) -> Any:
    layer = keras.layers.Dense(8, kernel_regularizer="l2", activation="tanh")
    model = compiled(keras, network(keras, layer))
    return result(model, model.fit(*data(131), epochs=2, batch_size=BATCH, verbose=0))


def _add_loss(keras: Any, reduce: Any) -> Any:
    class Penalty(keras.layers.Layer):  # type: ignore[misc]  # Keras is untyped
        def call(self, inputs: Any) -> Any:
            self.add_loss(0.001 * reduce(inputs * inputs))
            return inputs

    return train(keras, network(keras, Penalty()))


@case(notice="add_loss")
def add_loss_mean(keras: Any) -> Any:
    import tensorflow as tf

    return _add_loss(keras, tf.reduce_mean)


@case("told", "add_loss")
def add_loss_sum(keras: Any) -> Any:
    import tensorflow as tf

    return _add_loss(keras, tf.reduce_sum)


@case()
def class_weight(keras: Any) -> Any:
    model = compiled(keras)
    return result(model, model.fit(*data(), epochs=2, batch_size=BATCH, verbose=0, class_weight={0: 1.0, 1: 3.0}))


@case(three=True)
def sample_weight(keras: Any) -> Any:
    import numpy as np

    model = compiled(keras, metrics=[], weighted_metrics=["accuracy"])
    weights = np.linspace(0.1, 2.0, 131)
    return result(model, model.fit(*data(131), sample_weight=weights, epochs=2, batch_size=BATCH, verbose=0))


@case()
def outputs_with_loss_weights(keras: Any) -> Any:
    x, y = data()
    model = _heads(keras, "first", "second")
    loss = {"first": "binary_crossentropy", "second": "mse"}
    model.compile("sgd", loss, loss_weights={"first": 0.2, "second": 2.0}, metrics={"first": "accuracy"})
    history = model.fit(x, {"first": y, "second": x.mean(axis=1)}, epochs=2, batch_size=BATCH, verbose=0)
    predicted = model.predict(x[:21], verbose=0)
    return weights_only(model, history=history.history, predict=predicted)


@case()
def masked_sequences(keras: Any) -> Any:
    import numpy as np

    tokens = np.random.RandomState(1).randint(1, 10, (ROWS, 6))
    tokens[: ROWS // 2, 2:] = 0  # in each batch the parts of the workers have to be masked differently
    tokens = tokens[np.random.RandomState(2).permutation(ROWS)]
    layers = [keras.layers.Embedding(10, 4, mask_zero=True), keras.layers.LSTM(4, return_sequences=True)]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers, keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(0.1), crossentropy(keras))
    history = model.fit(tokens, tokens, epochs=2, batch_size=BATCH, verbose=0)
    return weights_only(model, history=history.history, predict=model.predict(tokens[:21], verbose=0))
