"""train_fn's arguments as parameters of a run."""

from typing import Any

import numpy as np
import pytest

from dbx_tf.driver.parameters import describe


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("epochs", 5, "5"),
        ("rate", 0.1, "0.1"),
        ("nothing", None, "None"),
        ("layers", [1, 2], "[1, 2]"),
        ("x", np.zeros((3, 4), "float32"), "ndarray float32 [3, 4]"),
        ("scalar", np.float32(0.5), "0.5"),
        ("blob", b"12345", "bytes of 5 bytes"),
        ("names", list(range(1000)), "list of 1000 items"),
        ("text", "a" * 1000, "a" * 497 + "..."),
        ("password", "hunter2", "***"),
        ("db_token", "hunter2", "***"),
        ("store", {"api_key": "hunter2", "port": 1}, '{"api_key": "***", "port": 1}'),
        ("deep", {"a": {"secret": "hunter2"}}, '{"a": {"secret": "***"}}'),
    ],
)
def test_arguments_are_described(name: str, value: Any, text: str) -> None:
    """Scalars as they are, arrays by shape, secrets masked, long values shortened."""
    assert describe(name, value) == text
