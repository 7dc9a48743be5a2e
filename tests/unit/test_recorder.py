"""Recording what workers say in the driver's place, and its replay at the driver."""

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from dbx_tf.driver import recorder
from dbx_tf.driver.launch import Deputy
from dbx_tf.driver.limits import Limits
from dbx_tf.driver.mlflow_calls import Snapshot
from dbx_tf.wire import events
from dbx_tf.wire.channel import ChannelAddress, connect

RUN = SimpleNamespace(info=SimpleNamespace(run_id="a run", experiment_id="1"))
Heard = list[tuple[int, events.Event, bytes]]


class PlayedLauncher:
    """Its only task is a function of the test."""

    name = "played"
    host = bind_host = "127.0.0.1"
    has_servers = is_live = True

    def __init__(self, play: Callable[[ChannelAddress], None]) -> None:
        self._play = play

    def start(self, program: Any, make_deputy: Any, take: Any) -> None:
        """Play; `program` is the address of whoever leads the run."""
        self._thread = threading.Thread(target=self._play, args=(program,), daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def error(self) -> BaseException | None:
        return RuntimeError("Spark said no")

    def finish(self) -> None:
        self._thread.join(20)


def record(folder: Path, play: Callable[[ChannelAddress], None]) -> bytes:
    """What a recorder of one worker has written in the end."""
    file = folder / "events"
    launcher: Any = PlayedLauncher(play)
    with file.open("wb") as target:
        recording = recorder._Recorder(launcher, 1, Deputy(b"train_fn", {}, Snapshot(RUN, None), Limits()), target)
        recording.lead(recording.address)  # type: ignore[arg-type]  # in place of a program
    return file.read_bytes()


def heard(recorded: bytes, chunk_bytes: int) -> Heard:
    """What the driver hears of it."""
    found: Heard = []

    def take(hello: events.Hello, event: events.Event, body: IO[bytes]) -> None:
        found.append((hello.worker_index, event, body.read()))

    recorder.replay((recorded[i : i + chunk_bytes] for i in range(0, len(recorded), chunk_bytes)), take)
    return found


def train(address: ChannelAddress, *said: tuple[events.Event, bytes]) -> None:
    """Be a worker from its start to its end, and say something in between."""
    task = connect(address, 0, events.Role.TASK)
    task.send(events.Joined(attempt=1, host="a", address="10.0.0.1:1", executor="0", versions={}))
    start, payload = task.receive()
    assert isinstance(start, events.Start)
    assert payload.read() == b"train_fn"
    training = connect(address, 0, events.Role.TRAINING, attempt=1)
    training.send(events.Ready(pid=1, devices=["CPU:0"], num_replicas=1))
    for event, body in said:
        training.send(event, body)
        if isinstance(event, events.Upload):
            assert training.receive()[0] == events.Reply()
    training.send(events.Finished(), pickle.dumps(42))
    assert isinstance(training.receive()[0], events.Release)
    task.send(events.Exited(exit_code=0, log_tail=[]))
    task.close()
    training.close()


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_all_that_is_said_is_heard(tmp_path: Path, chunk_bytes: int) -> None:
    """In order and with its bodies, however it was cut; the run's token is not written down."""
    said = [
        (events.Metrics(values={"loss": 0.5}, step=0, is_epoch=True), b""),
        (events.ModelFile(path="data/model.keras"), bytes(range(256)) * 20),
        (events.Metrics(values={"loss": 0.25}, step=1, is_epoch=True), b""),
    ]
    tokens = []

    def play(address: ChannelAddress) -> None:
        tokens.append(address.token.encode())
        train(address, *said)

    recorded = record(tmp_path, play)
    assert tokens[0] not in recorded
    found = heard(recorded, chunk_bytes)
    kinds = [type(event).__name__ for _, event, _ in found]
    assert kinds == ["Joined", "Ready", "Metrics", "ModelFile", "Metrics", "Finished", "Exited"]
    assert [(event, body) for _, event, body in found[2:5]] == said
    (value,) = [body for _, event, body in found if isinstance(event, events.Finished)]
    assert pickle.loads(value) == 42


def test_a_model_that_user_code_logs_is_told(tmp_path: Path) -> None:
    """It can't be logged afterwards, since its id is needed at once: the person is told what to do."""
    upload = events.Upload(artifact_uri="x:/run/artifacts/model/data", path="model.keras")

    def play(address: ChannelAddress) -> None:
        train(address, (upload, b"weights"))

    found = heard(record(tmp_path, play), 1000)
    assert not any(isinstance(event, events.Upload) for _, event, _ in found)
    assert any("return the model from train_fn" in getattr(event, "text", "") for _, event, _ in found)


def test_what_nobody_said_is_recorded(tmp_path: Path) -> None:
    """A worker that is gone without a word is a failure that the driver hears of."""

    def play(address: ChannelAddress) -> None:
        task = connect(address, 0, events.Role.TASK)
        task.send(events.Joined(attempt=1, host="a", address="10.0.0.1:1", executor="0", versions={}))
        assert isinstance(task.receive()[0], events.Start)
        task.close()

    (failed,) = [event for _, event, _ in heard(record(tmp_path, play), 1000) if isinstance(event, events.Failed)]
    assert failed.cause_type == "TaskLost"


def test_a_sentence_is_told() -> None:
    """Through the same door as what workers say."""
    found: Heard = []
    recorder.tell("look here", lambda hello, event, body: found.append((hello.worker_index, event, body.read())))
    assert found == [(0, events.Notice(text="look here"), b"")]
