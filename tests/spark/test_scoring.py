"""Scoring a DataFrame: the column equals what the model predicts in one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dbx_tf
from dbx_tf import ConfigError
from dbx_tf.worker.export import save_mlflow_model

NUM_ROWS = 40
RANDOM = np.random.default_rng(1)
NUMBERS = RANDOM.normal(size=(NUM_ROWS, 4)).astype("float32")
IMAGES = RANDOM.integers(0, 255, size=(NUM_ROWS, 4, 4, 3))
IDS = RANDOM.integers(0, 10, size=(NUM_ROWS, 4))


def make(kind: str) -> tuple[Any, Any]:
    """A model, and its inputs in the shape that Keras wants."""
    import keras
    from keras import Input, Sequential, layers

    if kind == "table":
        return Sequential([Input((4,)), layers.Dense(1)]), NUMBERS
    if kind == "images":
        return Sequential([Input((4, 4, 3)), layers.Flatten(), layers.Dense(5)]), IMAGES.astype("float32")
    if kind == "bytes":
        model = Sequential([Input((4, 4, 3), dtype="uint8"), layers.Flatten(), layers.Rescaling(1 / 255)])
        return model, IMAGES.astype("uint8")
    if kind == "ids":
        return Sequential([Input((4,), dtype="int32"), layers.Embedding(10, 3), layers.Flatten()]), IDS
    a, b = Input((), name="a"), Input((3,), name="b")
    outputs = layers.Dense(2)(layers.Concatenate()([layers.Reshape((1,))(a), b]))
    return keras.Model({"a": a, "b": b}, outputs), {"a": NUMBERS[:, 0], "b": NUMBERS[:, 1:]}


@pytest.fixture
def rows(spark: Any) -> Any:
    """A DataFrame with each kind of column."""
    values = [
        (i, *NUMBERS[i].tolist(), *(x.tolist() for x in (NUMBERS[i], NUMBERS[i, 1:], IDS[i], image, image.ravel())))
        for i, image in enumerate(IMAGES)
    ]
    return spark.createDataFrame(values, ["i", "x0", "x1", "x2", "x3", "x", "rest", "ids", "image", "flat"])


@pytest.mark.parametrize(
    ("kind", "features"),
    [
        ("table", ["x0", "x1", "x2", "x3"]),
        ("table", "x"),
        ("images", "image"),
        ("images", "flat"),
        ("bytes", "image"),
        ("ids", "ids"),
        ("two", {"a": "x0", "b": ["x1", "x2", "x3"]}),
        ("two", {"a": "x0", "b": "rest"}),
    ],
)
def test_a_column_equals_predict(rows: Any, tmp_path: Path, kind: str, features: Any) -> None:
    """Scalars, arrays, images and named inputs arrive in the shape that the model wants."""
    model, inputs = make(kind)
    expected = model.predict(inputs, verbose=0).reshape(NUM_ROWS, -1).squeeze()
    of_fit = None if isinstance(inputs, dict) else ((None, *inputs.shape[1:]), inputs.dtype.name)
    save_mlflow_model(model, tmp_path / "model", of_fit)
    scored = dbx_tf.score(rows, str(tmp_path / "model"), features, output="y", batch_size=16)
    assert rows.sparkSession.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") == "16"
    assert scored.columns == [*rows.columns, "y"]
    found = np.array([row.y for row in scored.orderBy("i").select("y").collect()])
    # The sums are of float32 numbers as large as the largest output, in an order that depends on the batch.
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5 * max(1.0, float(np.abs(expected).max())))


def test_what_does_not_fit_is_told(rows: Any, tmp_path: Path) -> None:
    """A missing column, a missing input, and a model without a signature."""
    import mlflow

    save_mlflow_model(make("two")[0], tmp_path / "two", None)
    with pytest.raises(ConfigError, match=r"features has a; the model takes a, b; give columns for each"):
        dbx_tf.score(rows, str(tmp_path / "two"), {"a": "x0"})
    with pytest.raises(ConfigError, match=r"names y0, which is no column; the DataFrame has i, x0"):
        dbx_tf.score(rows, str(tmp_path / "two"), {"a": "y0", "b": "rest"})
    mlflow.keras.save_model(make("two")[0], str(tmp_path / "bare"))
    with pytest.raises(ConfigError, match=r"does not say which tensors it takes"):
        dbx_tf.score(rows, str(tmp_path / "bare"), "x")
