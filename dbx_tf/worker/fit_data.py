"""What can be told of a fit's data from its arguments, without reading any of it.

Runs on: workers, in the training process.
"""

from __future__ import annotations

from typing import Any, Final

_DEFAULT_BATCH_SIZE: Final = 32  # Keras's


def batch_size(fit_arguments: dict[str, Any]) -> int | None:
    """The global batch size of a fit (examples), or None if it can't be told without reading the data."""
    x = fit_arguments["x"]
    if isinstance(x, dict | list | tuple) or hasattr(x, "shape"):
        return int(fit_arguments["batch_size"] or _DEFAULT_BATCH_SIZE)
    if not hasattr(x, "element_spec"):
        return getattr(x, "batch_size", None)  # a PyDataset, by the convention of Keras's examples
    leaf = x.element_spec
    while isinstance(leaf, dict | list | tuple) and leaf:
        leaf = next(iter(leaf.values())) if isinstance(leaf, dict) else leaf[0]
    shape = getattr(leaf, "shape", None)
    if shape is not None and shape.rank and shape[0]:
        return int(shape[0])
    # A dataset whose last batch may be smaller has no static batch size; the batch() inside it has. The attributes
    # are private to tf.data (TensorFlow 2.21, data/ops/batch_op.py): without them the rate is not reported.
    while x is not None:
        if (size := getattr(x, "_batch_size", None)) is not None:
            return int(size)
        x = getattr(x, "_input_dataset", None)
    return None


def num_rows(fit_arguments: dict[str, Any]) -> int | None:
    """The rows a fit trains on (examples), or None if its inputs are no arrays."""
    x = fit_arguments["x"]
    while isinstance(x, dict | list | tuple) and len(x):
        x = next(iter(x.values())) if isinstance(x, dict) else x[0]
    if not hasattr(x, "shape") or not len(x.shape):
        return None
    return int(x.shape[0] * (1 - (fit_arguments["validation_split"] or 0.0)))


def describe(x: Any) -> Any:
    """Shapes ([batch, ...], batch unknown) and dtypes of a fit's inputs, as a structure of (shape, dtype) pairs."""
    if hasattr(x, "element_spec"):
        spec = x.element_spec
        return describe(spec[0] if isinstance(spec, tuple) else spec)
    if isinstance(x, dict):
        return {name: describe(value) for name, value in x.items()}
    if isinstance(x, list | tuple):
        return [describe(value) for value in x]
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return (None, *tuple(x.shape)[1:]), getattr(x.dtype, "name", str(x.dtype))
    return None
