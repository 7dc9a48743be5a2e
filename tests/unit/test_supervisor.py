"""The supervisor against workers that are played by the test, over the real channel."""

import io
import pickle
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dbx_tf.cluster import Topology
from dbx_tf.driver.journal import Journal
from dbx_tf.driver.limits import Limits
from dbx_tf.driver.secrets import Secrets
from dbx_tf.driver.supervisor import Outcome, Supervisor
from dbx_tf.driver.tracker import NullTracker
from dbx_tf.wire import events
from dbx_tf.wire.channel import Connection, connect

VERSIONS = {"python": "3.12.3", "keras": "3.15"}


class PlayedLauncher:
    """A launcher without tasks: the test plays them."""

    name = "played"
    host = bind_host = "127.0.0.1"
    has_servers = is_live = True

    def __init__(self) -> None:
        self.running = True

    def start(self, program: Any, make_deputy: Any, take: Any) -> None:
        """Nothing is started."""

    def is_running(self) -> bool:
        return self.running

    def error(self) -> BaseException | None:
        return RuntimeError("Spark said no")

    def finish(self) -> None:
        """Nothing to wait for."""

    def collect(self, probe: Any, seconds: float) -> list[Any]:
        return []


class Stage:
    """A supervisor, and the means to play its workers."""

    def __init__(self, folder: Path, num_hosts: int = 1) -> None:
        self.launcher, self.shown = PlayedLauncher(), list[str]()
        self.kept: list[Connection] = []  # a connection that nobody holds is closed
        tracker = NullTracker()
        self.journal = Journal(folder, tracker, self.shown.append, Secrets({}))
        limits = Limits(stall_timeout_seconds=2.0, num_hosts=num_hosts)
        self.supervisor = Supervisor(self.launcher, 2, VERSIONS, self.journal, tracker, b"train_fn", limits)
        self.topologies: list[Topology] = []
        self._outcomes: list[Outcome] = []
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        self._outcomes.append(self.supervisor.wait(self.topologies.append))

    def outcome(self) -> Outcome:
        self._thread.join(20)
        return self._outcomes[0]

    def task(self, index: int, **changes: Any) -> Connection:
        connection = connect(self.supervisor.address, index, events.Role.TASK)
        self.kept.append(connection)
        self.join(connection, index, **changes)
        return connection

    def join(self, connection: Connection, index: int, **changes: Any) -> None:
        given = {"attempt": 1, "host": f"host{index}", "address": f"10.0.0.{index}:1", "executor": str(index)}
        connection.send(events.Joined(**{**given, "versions": VERSIONS, **changes}))

    def training(self, index: int, attempt: int = 1) -> Connection:
        connection = connect(self.supervisor.address, index, events.Role.TRAINING, attempt)
        self.kept.append(connection)
        connection.send(events.Ready(pid=index, devices=["CPU:0"], num_replicas=2))
        return connection


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.supervisor.close()


def received(connection: Connection) -> events.Event:
    return connection.receive()[0]


def test_workers_start_together_and_leave_together(stage: Stage) -> None:
    """Nobody starts before all have joined, nobody is released before all have finished."""
    tasks = [stage.task(index) for index in (0, 1)]
    for task in tasks:
        start, payload = task.receive()
        assert start == events.Start(addresses=("10.0.0.0:1", "10.0.0.1:1"))
        assert payload.read() == b"train_fn"
    trainings = [stage.training(index) for index in (0, 1)]
    trainings[1].send(events.Finished())
    trainings[0].send(events.Metrics(values={"loss": 0.5}, step=0, is_epoch=True))
    trainings[0].send(events.Finished(model_summary="layers"), pickle.dumps({"answer": 42}))
    for training in trainings:
        assert received(training) == events.Release()
    for task in tasks:
        task.send(events.Exited(exit_code=0, log_tail=[]))
    outcome = stage.outcome()
    assert outcome.failure is None
    assert outcome.value == {"answer": 42}
    assert outcome.model_summary == "layers"
    assert stage.journal.history == {"loss": [0.5]}
    assert [str(topology) for topology in stage.topologies] == ["2 workers on 2 hosts, 2 replicas in sync"]


def test_a_taken_port_makes_all_workers_start_again(stage: Stage) -> None:
    """One worker loses its port: both rejoin with new ports, and what the old processes say is not heard."""
    tasks = [stage.task(index) for index in (0, 1)]
    assert all(isinstance(received(task), events.Start) for task in tasks)
    old = stage.training(0)
    connect(stage.supervisor.address, 1, events.Role.TRAINING, 1).send(events.PortTaken())
    for task in tasks:
        assert received(task) == events.Rejoin(attempt=2)
    old.send(events.Failed(cause_type="UnavailableError", cause_message="x", traceback="", is_echo=False))
    for index, task in enumerate(tasks):
        stage.join(task, index, attempt=2, address=f"10.0.0.{index}:2")
    assert all(received(task) == events.Start(addresses=("10.0.0.0:2", "10.0.0.1:2")) for task in tasks)
    trainings = [stage.training(index, attempt=2) for index in (0, 1)]
    for training in trainings:
        training.send(events.Finished(), pickle.dumps(None))
    assert all(received(training) == events.Release() for training in trainings)
    for task in tasks:
        task.send(events.Exited(exit_code=0, log_tail=[]))
    assert stage.outcome().failure is None
    assert "lost its port" in stage.shown[0]


def test_ports_that_are_taken_again_and_again_end_the_run(stage: Stage) -> None:
    """After four attempts the error names the address."""
    tasks = [stage.task(index) for index in (0, 1)]
    for attempt in range(1, 5):
        assert all(isinstance(received(task), events.Start) for task in tasks)
        connect(stage.supervisor.address, 1, events.Role.TRAINING, attempt).send(events.PortTaken())
        if attempt < 4:
            for index, task in enumerate(tasks):
                assert received(task) == events.Rejoin(attempt=attempt + 1)
                stage.join(task, index, attempt=attempt + 1)
    failure = stage.outcome().failure
    assert failure is not None
    assert failure.cause_type == "ClusterError"
    assert "10.0.0.1:1" in failure.cause_message


@pytest.mark.parametrize(("wrong", "named"), [((1,), 1), ((0, 1), 0)])
def test_different_versions_are_refused(stage: Stage, wrong: tuple[int, ...], named: int) -> None:
    """A worker with another Keras than the others, or than the driver, is named with both versions."""
    for index in (0, 1):
        stage.task(index, versions={**VERSIONS, "keras": "3.5" if index in wrong else VERSIONS["keras"]})
    failure = stage.outcome().failure
    assert failure is not None
    assert failure.worker_index == named
    assert "keras 3.5 instead of 3.15" in failure.cause_message


def test_a_package_that_only_one_side_has_does_not_matter(stage: Stage) -> None:
    """A driver without TensorFlow may lead workers with it; a patch release of Python is no difference."""
    tasks = [stage.task(index, versions={**VERSIONS, "python": "3.12.9", "tensorflow": "2.21"}) for index in (0, 1)]
    assert all(isinstance(received(task), events.Start) for task in tasks)


def waiting(stacks: str = "") -> events.Inspected:
    return events.Inspected(doing=events.Doing.WAITING, where="waits inside TensorFlow", stacks=stacks)


def test_a_worker_that_is_left_behind_is_told(stage: Stage) -> None:
    """When one worker has finished and the other makes no step, it is blamed for waiting."""
    tasks = [stage.task(index) for index in (0, 1)]
    assert all(isinstance(received(task), events.Start) for task in tasks)
    trainings = [stage.training(index) for index in (0, 1)]
    trainings[1].send(events.Finished())
    assert received(tasks[0]) == events.Inspect()
    tasks[0].send(waiting("File x"))
    failure = stage.outcome().failure
    assert failure is not None
    assert (failure.worker_index, failure.cause_type) == (0, "Stalled")
    assert "worker 1 on host host1 has finished, but worker 0 on host host0" in failure.cause_message


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            events.Inspected(doing=events.Doing.BUSY, where="is at user.py, line 3, in wait", stacks="File user.py"),
            "worker 1 on host host1 is at user.py, line 3, in wait; waiting for that: worker 0 on host host0",
        ),
        (None, "worker 1 on host host1 does not answer: its server is frozen"),
    ],
)
def test_who_is_waited_for_is_told(stage: Stage, answer: events.Inspected | None, text: str) -> None:
    """When no step is finished, the worker that the other waits for is blamed, with the stacks of both."""
    tasks = [stage.task(index) for index in (0, 1)]
    assert all(isinstance(received(task), events.Start) for task in tasks)
    for index in (0, 1):
        stage.training(index).send(events.Progressed(num_steps=1))
        assert received(tasks[index]) == events.Inspect() if index else True
    assert received(tasks[0]) == events.Inspect()
    tasks[0].send(waiting("File fit.py"))
    if answer:
        tasks[1].send(answer)
    failure = stage.outcome().failure
    assert failure is not None
    assert (failure.worker_index, failure.cause_type) == (1, "Stalled")
    assert "no worker has finished a step for stall_timeout_seconds=2" in failure.cause_message
    assert text in failure.cause_message
    assert "File fit.py" in failure.traceback
    assert ("File user.py" in failure.traceback) == bool(answer)


def test_steps_are_progress(stage: Stage) -> None:
    """As long as steps are finished nothing stalls, whatever is printed."""
    tasks = [stage.task(index) for index in (0, 1)]
    assert all(isinstance(received(task), events.Start) for task in tasks)
    trainings = [stage.training(index) for index in (0, 1)]
    for step in range(6):
        time.sleep(0.5)
        trainings[0].send(events.Progressed(num_steps=step))
    started = time.monotonic()
    for _ in range(8):
        tasks[0].send(events.LogLines(lines=["still here"]))
        time.sleep(0.5)
    assert stage.outcome().failure is not None
    assert time.monotonic() - started < 12


def test_the_stopped_worker_behind_an_echo_is_named(stage: Stage) -> None:
    """Only an aborted worker has spoken: the one that can't run is the cause."""
    tasks = [stage.task(index) for index in (0, 1)]
    assert all(isinstance(received(task), events.Start) for task in tasks)
    training = stage.training(0)
    stage.training(1)
    training.send(events.Failed(cause_type="UnavailableError", cause_message="x", traceback="", is_echo=True))
    tasks[0].send(events.Exited(exit_code=1, log_tail=[]))
    assert received(tasks[1]) == events.Inspect()
    tasks[1].send(events.Inspected(doing=events.Doing.STOPPED, where="is stopped (SIGSTOP)", stacks=""))
    failure = stage.outcome().failure
    assert failure is not None
    assert (failure.worker_index, failure.cause_type) == (1, "Unresponsive")
    assert "is stopped (SIGSTOP)" in failure.cause_message


def test_workers_on_too_few_hosts_do_not_start(tmp_path: Path) -> None:
    """require_hosts says where they landed and how to spread them."""
    stage = Stage(tmp_path, num_hosts=2)
    for index in (0, 1):
        stage.task(index, host="one", address=f"10.0.0.1:{index}", executor="0")
    failure = stage.outcome().failure
    stage.supervisor.close()
    assert failure is not None
    assert failure.cause_type == "ClusterError"
    assert "require_hosts=2, but 2 workers are on one host (2 on one), because Spark fills" in failure.cause_message
    assert "spark.task.cpus" in failure.cause_message


@pytest.mark.parametrize("echo_first", [True, False])
def test_the_first_cause_is_told_not_its_echo(stage: Stage, echo_first: bool) -> None:
    """Worker 1 fails, worker 0 is aborted by that: worker 1 is blamed, whichever says so first."""
    tasks = [stage.task(index) for index in (0, 1)]
    assert all(isinstance(received(task), events.Start) for task in tasks)
    trainings = [stage.training(index) for index in (0, 1)]
    echo = events.Failed(cause_type="UnavailableError", cause_message="aborted", traceback="", is_echo=True)
    cause = events.Failed(cause_type="ValueError", cause_message="user bug", traceback="line 7", is_echo=False)
    said = [(0, echo), (1, cause)]
    for index, event in said if echo_first else reversed(said):
        trainings[index].send(event)
        tasks[index].send(events.Exited(exit_code=1, log_tail=[f"tail of {index}"]))
    failure = stage.outcome().failure
    assert failure is not None
    assert (failure.worker_index, failure.host, failure.cause_type) == (1, "host1", "ValueError")
    assert failure.traceback == "line 7"


def test_a_lost_task_is_told(stage: Stage) -> None:
    """A task whose connection ends without a word has lost its Python worker, executor or server."""
    tasks = [stage.task(index) for index in (0, 1)]
    assert all(isinstance(received(task), events.Start) for task in tasks)
    tasks[1].close()
    failure = stage.outcome().failure
    assert failure is not None
    assert (failure.worker_index, failure.cause_type) == (1, "TaskLost")


def test_a_launch_that_ends_early_is_told_with_its_error(stage: Stage) -> None:
    """When Spark ends the job before any worker could speak, its own words are told."""
    stage.launcher.running = False
    failure = stage.outcome().failure
    assert failure is not None
    assert failure.cause_message == "Spark said no"


def test_stop_reaches_every_task(stage: Stage) -> None:
    """Stopping a run sends the reason to all tasks, and their end is no failure any more."""
    tasks = [stage.task(index) for index in (0, 1)]
    for task in tasks:
        received(task)
    stage.supervisor.stop("cancelled")
    assert all(received(task) == events.Stop(reason="cancelled") for task in tasks)


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "a/../../evil", ""])
def test_a_model_file_stays_in_its_folder(stage: Stage, path: str) -> None:
    """A path that leads out of the model's folder is refused."""
    with pytest.raises(ValueError, match="not a path inside"):
        stage.journal.add_model_file(path, io.BytesIO(b"evil"))
    assert not list(stage.journal.model_folder.parent.rglob("*evil*"))


def test_returned_metrics_become_the_history(stage: Stage) -> None:
    """A loop of the user's own that returns lists of numbers gets a history, other values none."""
    stage.journal.add_returned({"loss": [2.0, 1.0], "name": "x", "nothing": []})
    assert stage.journal.history == {"loss": [2.0, 1.0]}


def test_a_notice_is_shown_once(stage: Stage) -> None:
    """Four workers that say the same are heard once."""
    for _ in range(4):
        stage.journal.add_notice("the same")
    assert stage.journal.notices == stage.shown == ["the same"]
