"""A global batch is split so that every row is somewhere once, also over several replicas of a worker."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def parts_of(dataset: Any, num_workers: int, num_local: int) -> list[list[Any]]:
    """The parts of each worker; the strategy is a double that knows its size only."""
    from dbx_tf.worker.global_batch import split

    strategy = SimpleNamespace(num_replicas_in_sync=num_workers * num_local)
    return [list(split(strategy, dataset, index, num_workers)) for index in range(num_workers)]


@pytest.mark.parametrize(("num_workers", "num_local"), [(2, 1), (3, 1), (2, 2), (1, 4), (3, 2)])
@pytest.mark.parametrize("rows", [1, 7, 12, 25])
def test_every_row_is_in_one_part(num_workers: int, num_local: int, rows: int) -> None:
    import tensorflow as tf

    x: Any = np.arange(rows * 3, dtype="float32").reshape(rows, 3)
    batches = tf.data.Dataset.from_tensor_slices({"x": x, "row": np.arange(rows)}).batch(12)
    workers = parts_of(batches, num_workers, num_local)
    num_batches = -(-rows // 12)
    assert {len(parts) for parts in workers} == {num_batches * num_local}
    seen = []
    for number in range(num_batches):
        # Keras puts predictions together in this order: the first replica of each worker, then the second, ...
        order = [
            workers[worker][number * num_local + local] for local in range(num_local) for worker in range(num_workers)
        ]
        size = min(12, rows - number * 12)
        assert sum(float(part.share) for part in order) == pytest.approx(1.0)
        for part in order:
            assert len(part.batch["x"]) == pytest.approx(float(part.share) * size)
            np.testing.assert_array_equal(part.batch["x"][:, 0], 3 * part.batch["row"])
            seen += part.batch["row"].numpy().tolist()
    assert seen == list(range(rows))


def test_ragged_and_sparse_rows_are_split_too() -> None:
    import tensorflow as tf

    ragged = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]])
    sparse = tf.sparse.from_dense(np.eye(5, dtype="float32"))
    batches = tf.data.Dataset.from_tensors((ragged, sparse))
    (first,), (second,) = parts_of(batches, 2, 1)
    assert first.batch[0].to_list() + second.batch[0].to_list() == ragged.to_list()
    halves = [tf.sparse.to_dense(part.batch[1]).numpy() for part in (first, second)]
    np.testing.assert_array_equal(np.concatenate(halves), np.eye(5))


def test_scalars_are_no_rows() -> None:
    import tensorflow as tf

    with pytest.raises(ValueError, match="the data has no rows"):
        parts_of(tf.data.Dataset.from_tensor_slices(np.arange(3)), 2, 1)
