"""Where the rows come from, and how they divide."""

import tempfile
from pathlib import Path
from typing import Any

from .table import BATCH, FEATURES, ROWS, case, compiled, data, fit, network, result, weights_only


def _batches(rows: int = ROWS, size: int = BATCH) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(data(rows)).batch(size)


def _with_policy(dataset: Any, name: str) -> Any:
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[name]
    return dataset.with_options(options)


@case(three=True)
def arrays_shuffled(keras: Any) -> Any:
    return fit(keras, *data(131), batch_size=BATCH, shuffle=True)


@case()
def arrays_in_order(keras: Any) -> Any:
    return fit(keras, *data(), batch_size=BATCH, shuffle=False)


@case(three=True)
def last_batch_uneven(keras: Any) -> Any:
    return fit(keras, *data(135), batch_size=16, shuffle=False)


@case()
def last_batch_of_one_row(keras: Any) -> Any:
    return fit(keras, *data(129), batch_size=64, shuffle=False)


@case(three=True)
def fewer_rows_than_workers(keras: Any) -> Any:
    return fit(keras, *data(1))


@case()
def batch_size_odd(keras: Any) -> Any:
    return fit(keras, *data(), batch_size=45)


@case(three=True)
def validation_split(keras: Any) -> Any:
    return fit(keras, *data(), batch_size=BATCH, validation_split=0.3)


@case()
def validation_on_a_dataset(keras: Any) -> Any:
    return fit(keras, _batches(131), validation_data=_batches(67))


@case()
def pandas_frame(keras: Any) -> Any:
    import pandas as pd

    x, y = data(131)
    return fit(keras, pd.DataFrame(x), pd.Series(y), batch_size=BATCH)


@case()
def tensors(keras: Any) -> Any:
    import tensorflow as tf

    x, y = data(131)
    return fit(keras, tf.constant(x), tf.constant(y), batch_size=BATCH)


@case(three=True)
def dataset(keras: Any) -> Any:
    return fit(keras, _batches())


@case(three=True)
def dataset_last_batch_uneven(keras: Any) -> Any:
    return fit(keras, _batches(131, 16))


@case()
def dataset_shuffled(keras: Any) -> Any:
    import tensorflow as tf

    return fit(keras, tf.data.Dataset.from_tensor_slices(data(131)).shuffle(131).batch(BATCH))


@case()
def dataset_drop_remainder(keras: Any) -> Any:
    import tensorflow as tf

    return fit(keras, tf.data.Dataset.from_tensor_slices(data(131)).batch(BATCH, drop_remainder=True))


@case()
def dataset_with_sample_weights(keras: Any) -> Any:
    import numpy as np
    import tensorflow as tf

    weighted = (*data(131), np.linspace(0.1, 2.0, 131))
    return fit(keras, tf.data.Dataset.from_tensor_slices(weighted).batch(BATCH))


@case()
def dataset_of_unknown_length(keras: Any) -> Any:
    return fit(keras, _batches(131).filter(lambda x, y: True))


@case(three=True)
def dataset_repeated(keras: Any) -> Any:
    return fit(keras, _batches().repeat(), steps_per_epoch=3)


@case()
def dataset_with_fewer_steps_than_batches(keras: Any) -> Any:
    return fit(keras, _batches(), steps_per_epoch=2)


@case()
def dataset_policy_data(keras: Any) -> Any:
    return fit(keras, _with_policy(_batches(131), "DATA"))


@case("refused", "AutoShardPolicy.OFF")
def dataset_policy_off(keras: Any) -> Any:
    return fit(keras, _with_policy(_batches(), "OFF"))


@case("refused", "AutoShardPolicy.OFF")
def validation_policy_off(keras: Any) -> Any:
    return fit(keras, _batches(), validation_data=_with_policy(_batches(), "OFF"))


def _files(policy: str) -> Any:
    import tensorflow as tf

    folder = Path(tempfile.gettempdir()) / "dbx_tf-conformance-files"
    folder.mkdir(exist_ok=True)
    x, _ = data()
    names = []
    for index in range(2):
        path = Path(tempfile.mkdtemp(dir=folder)) / f"{index}.tfrecord"
        names.append(str(path))
        with tf.io.TFRecordWriter(str(path)) as writer:
            for row in x[index::2]:
                writer.write(tf.io.serialize_tensor(row).numpy())

    def parse(record: Any) -> Any:
        row = tf.ensure_shape(tf.io.parse_tensor(record, tf.float32), (FEATURES,))
        return row, tf.cast(tf.reduce_sum(row) > FEATURES / 2, tf.int64)

    return _with_policy(tf.data.TFRecordDataset(names).map(parse).batch(BATCH), policy)


@case()
def files(keras: Any) -> Any:
    return fit(keras, _files("AUTO"))


@case("told", "AutoShardPolicy.FILE")
def files_policy_file(keras: Any) -> Any:
    return fit(keras, _files("FILE"))


@case("told", "AutoShardPolicy.HINT")
def dataset_policy_hint(keras: Any) -> Any:
    import tensorflow as tf

    x, y = data()
    rows = tf.data.Dataset.range(ROWS)
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:  # TensorFlow has hints for strategies alone
        rows = rows.shard(tf.data.experimental.SHARD_HINT, tf.data.experimental.SHARD_HINT)
    batches = rows.map(lambda row: (tf.gather(x, row), tf.gather(y, row))).batch(BATCH // 2)
    return fit(keras, _with_policy(batches, "HINT"))


@case("refused", "AutoShardPolicy.FILE")
def dataset_policy_file_without_files(keras: Any) -> Any:
    return fit(keras, _with_policy(_batches(), "FILE"))


@case()
def generator(keras: Any) -> Any:
    x, y = data()
    return fit(keras, ((x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, ROWS, BATCH)), epochs=1)


@case()
def dataset_from_generator(keras: Any) -> Any:
    import tensorflow as tf

    x, y = data(131)
    spec = (tf.TensorSpec((None, FEATURES), tf.float32), tf.TensorSpec((None,), tf.int64))
    made = tf.data.Dataset.from_generator(
        lambda: ((x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, 131, BATCH)), output_signature=spec
    )
    return fit(keras, made)


@case()
def py_dataset(keras: Any) -> Any:
    x, y = data(131)
    base = getattr(keras.utils, "PyDataset", None) or keras.utils.Sequence

    class Batches(base):  # type: ignore[misc, valid-type]  # Keras is untyped
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            rows = slice(index * BATCH, (index + 1) * BATCH)
            return x[rows], y[rows]

    return fit(keras, Batches(), shuffle=True)


@case(three=True)
def batches_of_different_lengths(keras: Any) -> Any:
    """Sequences padded to the longest of their batch."""
    import numpy as np
    import tensorflow as tf

    lengths = np.random.RandomState(3).randint(1, 9, 131)
    rows = tf.RaggedTensor.from_row_lengths(np.arange(lengths.sum()) % 9 + 1, lengths)
    batches = tf.data.Dataset.from_tensor_slices((rows, data(131)[1])).ragged_batch(16)
    layers = [keras.layers.Embedding(10, 4, mask_zero=True), keras.layers.LSTM(4), keras.layers.Dense(2)]
    model = compiled(keras, keras.Sequential(layers))
    history = model.fit(batches.map(lambda x, y: (x.to_tensor(), y)), epochs=2, verbose=0)
    return weights_only(model, history=history.history)


@case(legacy="absent")
def ragged(keras: Any) -> Any:
    import numpy as np
    import tensorflow as tf

    class Mean(keras.Model):  # type: ignore[misc]  # Keras is untyped
        def __init__(self) -> None:
            super().__init__()
            self.out = keras.layers.Dense(2)

        def call(self, inputs: Any) -> Any:
            rows = inputs.to_tensor() if isinstance(inputs, tf.RaggedTensor) else inputs
            return self.out(keras.ops.sum(keras.ops.cast(rows, "float32"), axis=1, keepdims=True))

    lengths = np.random.RandomState(3).randint(1, 9, 131)
    rows = tf.RaggedTensor.from_row_lengths(np.arange(lengths.sum(), dtype="float32") % 9 / 9, lengths)
    batches = tf.data.Dataset.from_tensor_slices((rows, data(131)[1])).ragged_batch(16)
    model = compiled(keras, Mean())
    return weights_only(model, history=model.fit(batches, epochs=2, verbose=0).history)


@case()
def sparse(keras: Any) -> Any:
    import numpy as np
    import tensorflow as tf

    x, y = data(131)
    x = np.where(x > 0.5, x, 0)
    batches = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(BATCH)
    inputs = keras.Input((FEATURES,), sparse=True)
    model = compiled(keras, keras.Model(inputs, keras.layers.Dense(2)(inputs)))
    return weights_only(model, history=model.fit(batches, epochs=2, verbose=0).history)


def _own_half(rows: int = ROWS) -> Any:
    """Each worker takes its own rows of each global batch."""
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()

    def make(context: Any) -> Any:
        index, count = context.input_pipeline_id, context.num_input_pipelines
        return _batches(rows).map(lambda x, y: (x[index::count], y[index::count]))

    return strategy.distribute_datasets_from_function(make)


@case(legacy="absent")
def distributed_from_a_function(keras: Any) -> Any:
    return fit(keras, _own_half(131))


@case()
def distributed_from_a_function_repeated(keras: Any) -> Any:
    return fit(keras, _own_half(131), steps_per_epoch=2, epochs=1)


@case(legacy="absent")
def distributed_dataset(keras: Any) -> Any:
    import tensorflow as tf

    return fit(keras, tf.distribute.get_strategy().experimental_distribute_dataset(_batches(135)))


@case("refused", "different numbers of batches", legacy="absent")
def workers_with_different_numbers_of_batches(keras: Any) -> Any:
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    made = strategy.distribute_datasets_from_function(lambda context: _batches().take(3 - context.input_pipeline_id))
    return fit(keras, made)


@case("refused", "different numbers of batches")
def workers_with_arrays_of_different_lengths(keras: Any) -> Any:
    from dbx_tf import get_context

    return fit(keras, *data(ROWS - get_context().worker_index * BATCH), batch_size=BATCH)


@case()
def batches_one_by_one(keras: Any) -> Any:
    x, y = data(131)
    model = compiled(keras, network(keras))
    logs = [model.train_on_batch(x[i : i + BATCH], y[i : i + BATCH], return_dict=True) for i in range(0, 131, BATCH)]
    tested = model.test_on_batch(x, y, return_dict=True)
    return {"logs": logs, "tested": tested, "weights": model.get_weights()}


@case()
def predictions_of_one_batch(keras: Any) -> Any:
    model = compiled(keras, network(keras))
    history = model.fit(*data(), verbose=0)
    return result(model, history, batch=model.predict_on_batch(data(5)[0]))
