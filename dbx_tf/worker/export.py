"""Makes an MLflow model folder of the trained model, on the worker that has it.

Runs on: workers, in the training process. The driver never needs to load the model to log it.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any


def find_model(value: Any, last_fitted: Any) -> Any:
    """The Keras model to log: what train_fn returned (also inside a tuple, list or dict), else the last one fitted."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return next((item for item in items if is_keras_model(item)), last_fitted)


def is_keras_model(value: Any) -> bool:
    """True for a model of Keras 3 or of tf_keras; loads neither."""
    bases = {(base.__module__.partition(".")[0], base.__name__) for base in type(value).__mro__}
    return bool(bases & {("keras", "Model"), ("tf_keras", "Model")})


def is_legacy(model: Any) -> bool:
    """True for a model of tf_keras."""
    return any(base.__module__.startswith("tf_keras") for base in type(model).__mro__)


def detach(model: Any, weights: list[Any]) -> Any:
    """A copy of a tf_keras model that no other worker is needed to read.

    tf_keras keeps metric and BatchNormalization state in variables that are summed over the workers on reading
    (tf.VariableSynchronization.ON_READ): reading them on one worker alone would wait for the others for ever.

    Args:
        model: The model.
        weights: Its `get_weights()`, which every worker must have called in the same place.

    Returns:
        An uncompiled model with plain variables; compiled, it would not load where Keras 3 is in use.
    """
    copy = type(model).from_config(model.get_config())
    if not copy.built:
        copy.build(model.input_shape)
    copy.set_weights(weights)
    return copy


def save_mlflow_model(model: Any, path: Path, inputs: Any) -> None:
    """Write the folder that `mlflow.pyfunc.load_model` and Keras's flavor can load.

    Args:
        model: A Keras 3 model, or a detached tf_keras model.
        path: The folder to make.
        inputs: The inputs of its last fit as `Reporter.inputs`, for models that don't know theirs.
    """
    import mlflow

    legacy = is_legacy(model)
    arguments: dict[str, Any] = {
        "path": str(path),
        "signature": make_signature(model, inputs),
        "pip_requirements": _requirements(legacy),
    }
    if legacy:
        mlflow.tensorflow.save_model(model, keras_model_kwargs={"save_format": "keras"}, **arguments)
    else:
        mlflow.keras.save_model(model, **arguments)


def make_signature(model: Any, inputs: Any) -> Any:
    """MLflow signature with the tensors that go in and come out, or None if the model can't tell them."""
    from mlflow.models import ModelSignature

    given = _declared(model, "input") or inputs
    outputs = _declared(model, "output") or (_computed_outputs(model, given) if given else None)
    if not given or not outputs:
        return None
    return ModelSignature(inputs=_schema(given), outputs=_schema(outputs))


def _declared(model: Any, side: str) -> Any:
    """The structure of (shape, dtype) of a Functional or Sequential model's `input` or `output`; None for others."""
    try:
        tensors = getattr(model, side)
    except (AttributeError, ValueError, RuntimeError):
        return None
    return _pairs(tensors)


def _pairs(tensors: Any) -> Any:
    if isinstance(tensors, dict):
        return {name: _pairs(tensor) for name, tensor in tensors.items()}
    if isinstance(tensors, list | tuple):
        # Inputs given as a list are fed by name through MLflow.
        names = [str(getattr(tensor, "name", f"tensor_{index}")) for index, tensor in enumerate(tensors)]
        return {name: _pairs(tensor) for name, tensor in zip(names, tensors, strict=True)}
    if tensors is None:
        return None
    dtype = tensors.dtype
    return tuple(tensors.shape), getattr(dtype, "name", str(dtype))


def _computed_outputs(model: Any, inputs: Any) -> Any:
    """Outputs of a subclassed model, found by tracing it symbolically."""
    if is_legacy(model) or not hasattr(model, "compute_output_spec"):
        return None
    import keras

    def spec(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: spec(value) for name, value in node.items()}
        if isinstance(node, list):
            return [spec(value) for value in node]
        shape, dtype = node
        return keras.KerasTensor(shape, dtype=dtype)

    try:
        return _pairs(model.compute_output_spec(spec(inputs)))
    except Exception:  # noqa: BLE001  # user code in call(): without outputs the model is logged without a signature
        return None


def _schema(structure: Any) -> Any:
    import numpy as np
    from mlflow.types import Schema, TensorSpec

    def tensor(pair: Any, name: str | None = None) -> Any:
        shape, dtype = pair
        # bfloat16 and float16 weights still take and give arrays of float32
        kind = np.dtype("str") if dtype == "string" else np.dtype("float32" if dtype == "bfloat16" else dtype)
        return TensorSpec(kind, tuple(-1 if size is None else size for size in (None, *shape[1:])), name)

    if isinstance(structure, list):
        structure = {f"input_{index}": pair for index, pair in enumerate(structure)}
    if isinstance(structure, dict):
        return Schema([tensor(pair, name) for name, pair in structure.items()])
    return Schema([tensor(structure)])


def _requirements(legacy: bool) -> list[str]:
    """Exact versions of what the model needs; letting MLflow infer them takes minutes and can miss TensorFlow."""
    installed = {name.lower() for dist in importlib.metadata.distributions() if (name := dist.metadata["Name"])}
    tensorflow = next(name for name in ("tensorflow", "tensorflow-cpu", "tensorflow-intel") if name in installed)
    names = [tensorflow, "tf-keras" if legacy else "keras", "numpy"]
    return [f"{name}=={importlib.metadata.version(name)}" for name in names]


def summarize(model: Any) -> str:
    """The table that `model.summary()` prints."""
    lines: list[str] = []
    try:
        model.summary(print_fn=lambda line, **_: lines.append(str(line)))
    except ValueError as error:  # a model that was never built
        return f"{type(model).__name__}: {error}"
    return "\n".join(lines)
