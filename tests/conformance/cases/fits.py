"""What fit and compile may be asked for."""

from typing import Any

from .table import BATCH, case, compiled, data, fit, network, result, train


@case(three=True)
def steps_per_execution(keras: Any) -> Any:
    return train(keras, steps_per_execution=3)


@case()
def steps_per_execution_last_batch(keras: Any) -> Any:
    model = compiled(keras, steps_per_execution=5)
    history = model.fit(*data(135), batch_size=16, epochs=2, validation_data=data(67), verbose=0)
    return result(model, history)


@case()
def steps_per_execution_repeated(keras: Any) -> Any:
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices(data()).batch(BATCH).repeat()
    model = compiled(keras, steps_per_execution=2)
    return result(model, model.fit(batches, steps_per_epoch=4, epochs=2, verbose=0))


@case(legacy="absent")
def steps_per_execution_of_unknown_length(keras: Any) -> Any:
    import tensorflow as tf

    batches = tf.data.Dataset.from_tensor_slices(data(131)).batch(16).filter(lambda x, y: True)
    model = compiled(keras, steps_per_execution=4)
    return result(model, model.fit(batches, epochs=2, verbose=0))


@case("refused", "jit_compile=True")
def jit_compile(keras: Any) -> Any:
    return train(keras, jit_compile=True)


@case()
def run_eagerly(keras: Any) -> Any:
    model = compiled(keras, run_eagerly=True)
    return result(model, model.fit(*data(131), batch_size=BATCH, epochs=2, verbose=0))


@case()
def initial_epoch(keras: Any) -> Any:
    return fit(keras, *data(), batch_size=BATCH, initial_epoch=1, epochs=3)


@case()
def validation_freq(keras: Any) -> Any:
    return fit(keras, *data(), batch_size=BATCH, validation_data=data(67), validation_freq=2, epochs=4)


@case()
def two_fits(keras: Any) -> Any:
    model = compiled(keras)
    model.fit(*data(), batch_size=BATCH, verbose=0)
    return result(model, model.fit(*data(131), batch_size=64, epochs=3, initial_epoch=1, verbose=0))


@case()
def compiled_again(keras: Any) -> Any:
    model = compiled(keras)
    model.fit(*data(), batch_size=BATCH, verbose=0)
    model = compiled(keras, model, keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy")
    model.add(keras.layers.Softmax())
    return result(model, model.fit(*data(), batch_size=BATCH, verbose=0))


@case()
def layers_frozen(keras: Any) -> Any:
    hidden = keras.layers.Dense(8)
    hidden.trainable = False
    return train(keras, network(keras, hidden))


@case()
def progress_bar(keras: Any) -> Any:
    model = compiled(keras)
    return result(model, model.fit(*data(131), batch_size=BATCH, epochs=2, verbose=2))
