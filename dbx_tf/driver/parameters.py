"""Turns train_fn's arguments into the parameters of an MLflow run.

Runs on: driver.
"""

from __future__ import annotations

import json
from typing import Any, Final

from dbx_tf.driver.secrets import MASK, is_secret

_MAX_CHARACTERS: Final = 500
_MAX_ITEMS: Final = 100


def describe(name: str, value: Any) -> str:
    """A parameter as text: scalars as they are, arrays by type and shape, secrets masked, the rest shortened.

    Args:
        name: Its name; a value whose name, or whose key in a dict, looks like a secret's is not shown.
        value: Anything.
    """
    value = _masked(name, value)
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        return f"{type(value).__name__} {getattr(value, 'dtype', '')} {list(shape)}".replace("  ", " ")
    if isinstance(value, bytes | bytearray):
        return f"{type(value).__name__} of {len(value)} bytes"
    if isinstance(value, list | tuple | set | dict) and len(value) > _MAX_ITEMS:
        return f"{type(value).__name__} of {len(value)} items"
    text = json.dumps(value, default=str) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."


def _masked(name: Any, value: Any) -> Any:
    if is_secret(name):
        return MASK
    return {str(key): _masked(key, item) for key, item in value.items()} if isinstance(value, dict) else value
