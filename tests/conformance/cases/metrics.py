"""Metrics of every family, of Keras's and of users, made in the scope and outside."""

import threading
from typing import Any

from .table import BATCH, FEATURES, case, compiled, data, train, weights_only


def _fit_binary(keras: Any, metrics: list[Any], low: float = 0.0) -> Any:
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=metrics)
    x, y = data(131)
    y = y.reshape(-1, 1).astype("float32") * (1 - low) + low
    history = model.fit(x, y, epochs=2, batch_size=BATCH, verbose=0)
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    return weights_only(model, history=history.history, evaluate=evaluated)


@case()
def metrics_of_binary_classes(keras: Any) -> Any:
    m = keras.metrics
    return _fit_binary(
        keras,
        [
            *(m.BinaryAccuracy(), m.AUC(), m.AUC(curve="PR", name="pr"), m.Precision(), m.Recall()),
            *(m.TruePositives(), m.TrueNegatives(), m.FalsePositives(), m.FalseNegatives()),
            *(m.PrecisionAtRecall(0.5), m.RecallAtPrecision(0.5), m.SensitivityAtSpecificity(0.5)),
            *(m.SpecificityAtSensitivity(0.5), m.BinaryCrossentropy(), m.Hinge(), m.SquaredHinge()),
            *(m.BinaryIoU([0, 1]), m.F1Score(threshold=0.5), m.FBetaScore(beta=2.0, threshold=0.5)),
        ],
    )


@case()
def metrics_of_numbers(keras: Any) -> Any:
    m = keras.metrics
    return _fit_binary(
        keras,
        [
            *(m.MeanSquaredError(), m.RootMeanSquaredError(), m.MeanAbsoluteError(), m.R2Score()),
            *(m.MeanAbsolutePercentageError(), m.MeanSquaredLogarithmicError(), m.LogCoshError()),
            *(m.CosineSimilarity(), m.KLDivergence(), m.Poisson()),
        ],
        low=0.5,
    )


@case()
def metrics_of_many_classes(keras: Any) -> Any:
    import numpy as np

    m = keras.metrics
    x, _ = data(131)
    classes = (x.sum(axis=1) * 3).astype(int) % 4
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(4, activation="softmax")])
    metrics = [m.CategoricalAccuracy(), m.TopKCategoricalAccuracy(2), m.F1Score(average=None), m.CategoricalHinge()]
    metrics += [m.OneHotMeanIoU(4), m.CategoricalCrossentropy()]
    model.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy", metrics=metrics)
    history = model.fit(x, np.eye(4, dtype="float32")[classes], epochs=2, batch_size=BATCH, verbose=0)
    return weights_only(model, history=history.history)


@case()
def metrics_weighted(keras: Any) -> Any:
    import numpy as np

    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, activation="sigmoid")])
    weighted = [keras.metrics.AUC(), keras.metrics.Precision(), keras.metrics.BinaryAccuracy()]
    model.compile("sgd", "binary_crossentropy", weighted_metrics=weighted)
    x, y = data(131)
    weights = np.linspace(0.1, 2.0, 131)
    history = model.fit(x, y.reshape(-1, 1), sample_weight=weights, epochs=2, batch_size=BATCH, verbose=0)
    return weights_only(model, history=history.history)


@case()
def metric_function_of_a_scalar(keras: Any) -> Any:
    import tensorflow as tf

    def spread(y_true: Any, y_pred: Any) -> Any:
        return tf.reduce_mean(tf.abs(tf.cast(y_true, y_pred.dtype) - y_pred))

    return _fit_binary(keras, [spread])


@case(notice="its variables are summed over the workers")
def metric_of_ones_own(keras: Any) -> Any:
    import tensorflow as tf

    class Share(keras.metrics.Metric):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__(name="share")
            self.hits = self.add_weight(name="hits", shape=(), initializer="zeros")
            self.rows = self.add_weight(name="rows", shape=(), initializer="zeros")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
            self.hits.assign_add(tf.reduce_sum(tf.cast(y_pred > 0.5, tf.float32)))
            self.rows.assign_add(tf.cast(tf.shape(y_pred)[0], tf.float32))

        def result(self) -> Any:
            return self.hits / self.rows

    return _fit_binary(keras, [Share()])


@case("refused", "was made outside of the strategy's scope", legacy="absent")
def metric_made_outside_of_the_scope(keras: Any) -> Any:
    made = []
    thread = threading.Thread(target=lambda: made.append(keras.metrics.Precision()))  # a scope is a thread's own
    thread.start()
    thread.join()
    return _fit_binary(keras, made)


@case()
def metrics_without_a_loss_of_rows(keras: Any) -> Any:
    return train(keras, compiled(keras), metrics=["accuracy", "sparse_categorical_crossentropy"])
