"""What models save appears whole, whoever saves to the same path."""

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbx_tf.worker.saving import saved_whole


class Model:
    """A double of a Keras model: it writes its name where it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.paths: list[str] = []

    def save(self, filepath: Any, overwrite: bool = True) -> None:
        self.paths.append(str(filepath))
        Path(filepath).write_text(self.name)

    def save_weights(self, filepath: Any) -> None:
        raise OSError("no space left on device")

    def export(self, filepath: Any) -> None:
        Path(filepath).mkdir()
        Path(filepath, "saved_model.pb").write_text(self.name)


@pytest.fixture
def keras() -> types.SimpleNamespace:
    """A double of the module tf_keras, with a Model class of its own."""
    return types.SimpleNamespace(__name__="tf_keras", Model=type("Model", (Model,), dict(vars(Model))))


@pytest.fixture
def worker(keras: types.SimpleNamespace, tmp_path: Path) -> Iterator[Any]:
    """A model in a worker."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with saved_whole(keras, scratch, "run-1"):
        yield keras.Model("one")
    assert not list(scratch.iterdir())


def test_a_file_is_written_aside_and_moved(worker: Any, tmp_path: Path) -> None:
    target = tmp_path / "out" / "model.keras"
    target.parent.mkdir()
    target.write_text("old")
    worker.save(target)
    assert target.read_text() == "one"
    assert worker.paths[0] != str(target)
    assert [path.name for path in target.parent.iterdir()] == ["model.keras"]


def test_what_is_not_a_local_file_to_replace_is_left_to_keras(worker: Any, tmp_path: Path) -> None:
    target = tmp_path / "model.keras"
    worker.save(target, overwrite=False)
    assert worker.paths == [str(target)]
    with pytest.raises(FileNotFoundError):
        worker.save("s3://bucket/model.keras")
    assert worker.paths[1] == "s3://bucket/model.keras"


def test_a_failure_is_the_savers_own(worker: Any, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space left"):
        worker.save_weights(tmp_path / "model.weights.h5")
    assert not (tmp_path / "model.weights.h5").exists()


def test_a_folder_that_another_worker_has_just_put_there_is_left(keras: Any, worker: Any, tmp_path: Path) -> None:
    target = tmp_path / "exported"
    worker.export(target)
    (tmp_path / "other").mkdir()
    with saved_whole(types.SimpleNamespace(__name__="tf_keras", Model=Model), tmp_path / "other", "run-1"):
        Model("two").export(target)
        assert (target / "saved_model.pb").read_text() == "one"
        Model("two").export(target)  # a second export is one of its own
        assert (target / "saved_model.pb").read_text() == "two"
    assert {path.name for path in tmp_path.iterdir()} == {"exported", "other", "scratch"}


def test_keras_has_its_own_methods_back(keras: Any, tmp_path: Path) -> None:
    before = keras.Model.save
    with saved_whole(keras, tmp_path, "run-1"):
        assert keras.Model.save is not before
    assert keras.Model.save is before
