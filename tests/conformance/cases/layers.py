"""Layers with a state, with randomness, and over sequences."""

from typing import Any

from .table import BATCH, FEATURES, ROWS, case, compiled, data, network, result, train, weights_only

_PLAIN = "BatchNormalization normalises the rows of each replica"
_RANDOM = "draw other random numbers on each worker"


@case("told", _PLAIN)
def batch_normalization(keras: Any) -> Any:
    return train(keras, network(keras, keras.layers.BatchNormalization()))


@case("told", _PLAIN)
def batch_normalization_without_rows(keras: Any) -> Any:
    model = compiled(keras, network(keras, keras.layers.BatchNormalization()))
    return result(model, model.fit(*data(BATCH * 2 + 1), epochs=2, batch_size=BATCH, verbose=0))


@case(three=True)
def batch_normalization_synchronized(keras: Any) -> Any:
    return train(keras, network(keras, keras.layers.BatchNormalization(synchronized=True)))


@case()
def batch_normalization_synchronized_last_batch(keras: Any) -> Any:
    model = compiled(keras, network(keras, keras.layers.BatchNormalization(synchronized=True)))
    return result(model, model.fit(*data(BATCH * 2 + 1), epochs=2, batch_size=BATCH, verbose=0))


@case()
def batch_normalization_frozen(keras: Any) -> Any:
    layer = keras.layers.BatchNormalization(synchronized=True)
    layer.trainable = False
    return train(keras, network(keras, layer))


@case("told", _RANDOM)
def dropout(keras: Any) -> Any:
    return train(keras, network(keras, keras.layers.Dropout(0.5)))


@case("told", _RANDOM)
def dropout_masks(keras: Any) -> Any:
    """The halves of a batch have masks of their own."""
    import tensorflow as tf

    layer = keras.layers.Dropout(0.5)

    class Net(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def call(self, inputs: Any, training: Any = None) -> Any:
            return layer(tf.ones((64,)), training=training) * tf.reduce_mean(inputs)

        def train_step(self, batch: Any) -> Any:
            mask = layer(tf.ones((64,)), training=True)
            context = tf.distribute.get_replica_context()
            total = context.all_reduce("SUM", mask) / context.num_replicas_in_sync
            return {"same": tf.reduce_mean(tf.cast(tf.abs(total - mask) < 1e-3, tf.float32))}

    model = Net()
    model.compile("sgd")
    same = model.fit(*data(), batch_size=BATCH, verbose=0).history["same"][0]
    count = tf.distribute.get_strategy().num_replicas_in_sync
    if count > 1:
        same = same / count if keras.__name__ == "tf_keras" else same  # it adds up what the replicas log
        assert same < 0.9, f"{same} of the masks is the same on all workers"
    return {}


@case("told", _RANDOM)
def gaussian_noise(keras: Any) -> Any:
    return train(keras, network(keras, keras.layers.GaussianNoise(0.1)))


@case()
def normalizations_of_a_row(keras: Any) -> Any:
    middle = [keras.layers.LayerNormalization(), keras.layers.Reshape((4, 4)), keras.layers.GroupNormalization(2)]
    return train(keras, network(keras, *middle, keras.layers.Flatten()))


@case()
def spectral_normalization(keras: Any) -> Any:
    return train(keras, network(keras, keras.layers.SpectralNormalization(keras.layers.Dense(8))))


@case(three=True)
def lstm(keras: Any) -> Any:
    return train(keras, network(keras, keras.layers.Reshape((4, 4)), keras.layers.LSTM(6)))


@case()
def gru(keras: Any) -> Any:
    return train(keras, network(keras, keras.layers.Reshape((4, 4)), keras.layers.GRU(6)))


@case()
def bidirectional(keras: Any) -> Any:
    layer = keras.layers.Bidirectional(keras.layers.SimpleRNN(3))
    return train(keras, network(keras, keras.layers.Reshape((4, 4)), layer))


@case()
def convolution(keras: Any) -> Any:
    middle = [keras.layers.Reshape((4, 4, 1)), keras.layers.Conv2D(3, 2), keras.layers.MaxPooling2D()]
    return train(keras, network(keras, *middle, keras.layers.Flatten()))


@case()
def embedding(keras: Any) -> Any:
    layers = [keras.layers.Rescaling(9.99), keras.layers.Embedding(10, 4), keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((FEATURES,)), *layers, keras.layers.Dense(2)])
    return train(keras, model, keras.optimizers.SGD(0.1, global_clipnorm=0.05))


@case()
def attention(keras: Any) -> Any:
    inputs = keras.Input((FEATURES,))
    sequence = keras.layers.Reshape((4, 2))(inputs)
    attended = keras.layers.MultiHeadAttention(2, 3)(sequence, sequence)
    outputs = keras.layers.Dense(2)(keras.layers.Flatten()(attended))
    return train(keras, keras.Model(inputs, outputs))


@case()
def normalization_adapted(keras: Any) -> Any:
    layer = keras.layers.Normalization()
    layer.adapt(data()[0])
    model = keras.Sequential([keras.Input((FEATURES,)), layer, keras.layers.Dense(2)])
    return train(keras, model)


@case()
def strings_looked_up(keras: Any) -> Any:
    import numpy as np
    import tensorflow as tf

    words = np.array(["red", "green", "blue", "grey"])[np.arange(ROWS) % 4]
    lookup = keras.layers.StringLookup(vocabulary=["red", "green", "blue"])
    batches = tf.data.Dataset.from_tensor_slices((words[:, None], data()[1])).map(lambda x, y: (lookup(x), y))
    model = keras.Sequential([keras.Input((1,), dtype="int64"), keras.layers.Embedding(4, 3), keras.layers.Flatten()])
    model.add(keras.layers.Dense(2))
    model = compiled(keras, model)
    return weights_only(model, history=model.fit(batches.batch(BATCH), epochs=2, verbose=0).history)
