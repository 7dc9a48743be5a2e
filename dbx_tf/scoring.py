"""Scores a Spark DataFrame with a model that a run has logged.

Runs on: driver; the model itself on Spark's Python workers, through `mlflow.pyfunc.spark_udf`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dbx_tf.errors import ConfigError

_SPARK_TYPES: Final = {"float64": "double", "int64": "bigint", "int32": "int", "bool": "boolean"}
_ROWS_SETTING: Final = "spark.sql.execution.arrow.maxRecordsPerBatch"
Columns = str | Sequence[str]


def score(
    frame: Any,
    model_uri: str,
    features: Columns | Mapping[str, Columns],
    *,
    output: str = "prediction",
    batch_size: int | None = None,
) -> Any:
    """Add a column with a model's predictions to a DataFrame, on all servers.

    Each of Spark's Python workers loads the model once. Nothing is computed before the result is used.

    Args:
        frame: A Spark DataFrame, classic or of Spark Connect.
        model_uri: Address of a model in MLflow, such as `RunResult.model_uri` or `models:/main.ml.digits@champion`.
        features: What the model takes: the column that holds a row's array (an image may be nested or flat), or the
            scalar columns that make up a row, in order. For a model with several inputs, that for each input's name.
        output: Name of the new column: a number if the model gives one for each row, else an array of them (flat).
        batch_size: Rows that a worker holds at once, for large ones. It is set for the session
            (spark.sql.execution.arrow.maxRecordsPerBatch); None leaves what is set, which is 10,000 by default.

    Returns:
        The DataFrame with one more column.

    Raises:
        ConfigError: If the model does not say what it takes, or the columns don't fit it.
    """
    import mlflow

    signature = mlflow.models.get_model_info(model_uri).signature
    if signature is None or not signature.outputs or not signature.inputs.is_tensor_spec():
        what = f"the model {model_uri} does not say which tensors it takes and gives"
        raise ConfigError(f"{what}; a model that train_fn returns does; log others with a signature of tensors")
    outputs = list(signature.outputs)
    if len(outputs) != 1:
        what = f"the model {model_uri} gives {len(outputs)} tensors; one can be a column"
        raise ConfigError(f"{what}; use mlflow.pyfunc.spark_udf with a struct as result_type")
    by_input = features if isinstance(features, Mapping) else {signature.inputs.inputs[0].name: features}
    names = [spec.name for spec in signature.inputs]
    if set(by_input) != set(names):
        given = ", ".join(map(str, by_input)) if isinstance(features, Mapping) else "columns for one input"
        raise ConfigError(f"features has {given}; the model takes {', '.join(map(str, names))}; give columns for each")
    if batch_size is not None:
        frame.sparkSession.conf.set(_ROWS_SETTING, str(batch_size))
    columns = [_column(frame, by_input[spec.name], spec) for spec in signature.inputs]
    number = _spark_type(outputs[0])
    is_scalar = outputs[0].shape in ((-1,), (-1, 1))
    predict = mlflow.pyfunc.spark_udf(
        frame.sparkSession, model_uri, result_type=number if is_scalar else f"array<{number}>", env_manager="local"
    )
    return frame.withColumn(output, predict(*columns))


def _column(frame: Any, columns: Columns, spec: Any) -> Any:
    """One column with the values of a tensor, flat, as MLflow wants it."""
    from pyspark.sql import functions

    given = [columns] if isinstance(columns, str) else list(columns)
    if missing := [name for name in given if name not in frame.columns]:
        has = f"the DataFrame has {', '.join(frame.columns)}"
        raise ConfigError(f"features names {', '.join(missing)}, which is no column; {has}; name those")
    kind = _spark_type(spec)
    column, type_name = functions.col(given[0]), str(frame.schema[given[0]].dataType.simpleString())
    depth = type_name.count("array<")
    if len(given) == 1 and not depth and len(spec.shape) == 1:
        return column.cast(kind)
    if len(given) > 1 or not depth:
        column, depth = functions.array(*given), 1
    for _ in range(depth - 1):
        column = functions.flatten(column)
    return column.cast(f"array<{kind}>")


def _spark_type(spec: Any) -> str:
    return "string" if spec.type.kind == "U" else _SPARK_TYPES.get(spec.type.name, "float")
