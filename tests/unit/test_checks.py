"""Each check fires where it should and is silent elsewhere."""

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tf_keras

from dbx_tf.driver import checks
from dbx_tf.driver.reading import Used, read
from dbx_tf.errors import Problem


def spread(num_workers: int, executors: tuple[str, ...], available: int, task_cpus: int = 1, gpus: int = 0) -> str:
    return "\n".join(map(str, checks.check_spread(num_workers, executors, available, task_cpus, gpus)))


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ((2, ("a", "b"), 8), ["may share 1 of the 2 servers", "spark.task.cpus=4", "require_hosts=2"]),
        ((2, ("a", "b"), 4, 2), ["spark.task.cpus=4"]),
        ((1, ("a", "b"), 8), ["1 worker on a cluster of 2 servers: 1 will stand idle", "num_slots=2 trains on all"]),
        ((4, ("a", "a", "b", "b"), 8), ["may share 1 of the 2 servers", "room for 4 tasks"]),
        ((4, ("a", "b"), 8, 1, 1), ["num_slots=8", "spark.task.resource.gpu.amount=4"]),
        ((2, ("a", "b"), 2, 1, 4), []),
        ((2, ("a", "b"), 2), []),
        ((8, ("a", "b"), 8), []),
        ((4, ("a",), 4), []),
    ],
)
def test_servers_that_would_stand_idle_are_told(arguments: Any, texts: list[str]) -> None:
    """Spark may put workers together while other servers idle: the setting that spreads them is named."""
    found = spread(*arguments)
    assert all(text in found for text in texts)
    assert bool(found) == bool(texts)


def test_a_run_beside_its_cluster_is_told() -> None:
    """The question's case: local mode uses one machine, whatever the cluster has."""
    (problem,) = checks.check_use_of_cluster("local_mode=True", 2)
    assert "2 servers of the Spark session stand idle" in problem.what
    assert list(checks.check_use_of_cluster("local_mode=True", 0)) == []


def mirrored() -> None:
    import tensorflow as tf

    with tf.distribute.MirroredStrategy().scope():
        pass


def test_the_questions_strategy_is_told() -> None:
    """Who writes MirroredStrategy is told that it would use one server, and what trains instead."""
    assert "in place of train_fn's MirroredStrategy, which would use one server" in checks.describe_strategy(
        read(mirrored, {}), 2
    )
    assert checks.describe_strategy(read(mirrored, {}), 1) == "one worker"
    assert checks.describe_strategy(Used(), 2) == "MultiWorkerMirroredStrategy"


class Callback:
    """Of the caller's own, reached through a global name."""

    def on_epoch_end(self) -> Any:
        import keras

        return keras.callbacks.TensorBoard("logs")


def helper() -> Any:
    return Callback()


def uses_both(path: Any = None, epochs: int = 1) -> Any:
    return helper(), tf_keras.layers.Dense(1)


def uses_one() -> Any:
    return tf_keras.layers.Dense(1)


def test_code_is_read_through_what_it_calls() -> None:
    """Functions and classes of the caller's are followed, installed packages are not."""
    used = read(uses_both, {"path": Path("/data/x"), "epochs": 3})
    assert {"keras", "tf_keras"} <= used.modules
    assert "TensorBoard" in used.names
    assert used.texts["logs"] == "in on_epoch_end"
    assert used.texts["/data/x"] == "argument path"
    assert "Dense" in used.names
    assert len(used.names) < 40


class Absent:
    """Stands for something that is not there, as a lazy object does."""

    @property  # type: ignore[misc]  # the point of it
    def __class__(self) -> Any:
        raise RuntimeError("nothing is bound here")


ABSENT = Absent()


def test_what_can_not_be_read_is_passed_over() -> None:
    """Reading hints must not keep anybody from training."""

    def train_fn(batch_size: int = 32, **others: Any) -> Any:
        return ABSENT, later

    used = read(train_fn, {"rate": 0.1})
    later = 1
    assert used.arguments["batch_size"] == 32
    assert used.arguments["rate"] == 0.1
    assert "ABSENT" in used.names
    assert later
    assert read(print, {}).names == frozenset()


def texts_of(problems: Any) -> str:
    return "\n".join(str(problem) for problem in problems)


@pytest.mark.parametrize(
    ("train_fn", "env", "text"),
    [
        (uses_both, {}, "keras (Keras 3) and tf_keras (Keras 2)"),
        (helper, {"TF_USE_LEGACY_KERAS": "1"}, "imports keras (Keras 3), while TF_USE_LEGACY_KERAS"),
        (uses_one, {"TF_USE_LEGACY_KERAS": "1"}, ""),
        (uses_one, {}, ""),
        (helper, {}, ""),
    ],
)
def test_two_kerases_are_told(train_fn: Callable[..., Any], env: dict[str, str], text: str) -> None:
    """Objects of Keras 3 do not work in models of tf_keras."""
    found = "\n".join(
        line for line in texts_of(checks.check_code(read(train_fn, {}), env)).splitlines() if "Keras" in line
    )
    assert text in found
    assert bool(found) == bool(text)


def test_a_missing_tensorboard_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callback needs a package that TensorFlow no longer brings along."""
    found = importlib.util.find_spec
    for is_there in (True, False):
        spec = found("json") if is_there else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, spec=spec: spec)
        text = texts_of(checks.check_code(read(helper, {}), {}))
        assert ("%pip install tensorboard" in text) == (not is_there)
        assert not list(checks.check_code(Used(), {}))


def paths(text: str, where: str = "argument path", *, has_servers: bool = True) -> list[Problem]:
    return list(checks.check_paths(Used(texts={text: where}), has_servers=has_servers))


def test_paths_that_mean_something_else_on_workers_are_told(tmp_path: Path) -> None:
    """dbfs: addresses, workspace files, and the driver's own disk; volumes and what is not there are fine."""
    assert "use /dbfs/data/x" in str(paths("dbfs:/data/x")[0])
    assert "workers can't write there" in str(paths("/Workspace/Users/me/x")[0])
    with tempfile.NamedTemporaryFile() as file:
        assert "driver's own disk" in str(paths(file.name)[0])
        assert paths(file.name, has_servers=False) == []
        assert paths(file.name, "in train_fn") == []
    for text in ("/Volumes/main/ml/x", "relu", "a dbfs:/ address", "/local_disk0/is/not/there", "x" * 5000):
        assert paths(text) == []
