"""The errors: fields, bases, and that they survive pickling."""

import pickle

import pytest

from dbx_tf import ClusterError, ConfigError, DbxTfError, TrackingError, WorkerFailedError
from dbx_tf.errors import ArgumentProblem, Failure, Problem, raise_problems

FAILURE = Failure(1, "server-b", "KeyError", "'label'", "Traceback ...\nKeyError: 'label'", ("line 1", "line 2"))
PROBLEM = Problem("error", "num_slots=6", "at most 4", "lower num_slots")
ERRORS = [
    DbxTfError("plain"),
    ConfigError("bad argument", problems=(PROBLEM,)),
    ClusterError("bad cluster", problems=(PROBLEM,)),
    WorkerFailedError.from_failure(FAILURE, "run1"),
    TrackingError("no server", run_id="run1"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_survives_pickling(error: DbxTfError) -> None:
    """An error arrives in another process with its class, its message and its fields."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_errors_are_caught_as_their_builtin() -> None:
    """Each error is also what a caller without dbx_tf's names would expect."""
    assert issubclass(ConfigError, ValueError)
    assert all(issubclass(cls, RuntimeError) for cls in (ClusterError, WorkerFailedError, TrackingError))
    assert all(issubclass(type(error), DbxTfError) for error in ERRORS)


def test_worker_failed_error_tells_cause_place_and_run() -> None:
    """The message begins with the cause and says where it happened and where the logs are."""
    error = WorkerFailedError.from_failure(FAILURE, "run1")
    assert str(error).startswith("KeyError: 'label' [worker 1 on host server-b]")
    assert "Traceback" in str(error)
    assert "run1" in str(error)
    assert (error.worker_index, error.host, error.cause_type, error.run_id) == (1, "server-b", "KeyError", "run1")
    assert error.log_tail == ("line 1", "line 2")


def test_worker_failed_error_without_traceback_shows_the_output() -> None:
    """A process that died without a word is explained by its last lines."""
    error = WorkerFailedError.from_failure(Failure(0, "a", "ProcessKilled", "signal 9", "", ("last line",)), None)
    assert "last line" in str(error)


def test_all_problems_are_told_in_one_error() -> None:
    """Several problems are numbered in one message and kept as fields."""
    other = Problem("error", "ssl", "no ssl", "turn it off")
    warning = Problem("warning", "slow", "fast", "wait")
    with pytest.raises(ClusterError, match=r"1\. num_slots=6.*\n2\. ssl") as caught:
        raise_problems((PROBLEM, other, warning))
    assert caught.value.problems == (PROBLEM, other, warning)


def test_a_wrong_argument_makes_it_a_config_error() -> None:
    """The caller's own mistake decides the class of the error."""
    with pytest.raises(ConfigError):
        raise_problems((PROBLEM, ArgumentProblem("error", "x", "y", "z")))


def test_warnings_alone_raise_nothing() -> None:
    """A run with warnings goes ahead."""
    raise_problems((Problem("warning", "a", "b", "c"),))
