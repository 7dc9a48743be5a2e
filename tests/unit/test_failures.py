"""Which of several failures is the cause."""

import signal
import time

import pytest

from dbx_tf.driver import failures
from dbx_tf.driver.failures import FailureLog, describe_exit
from dbx_tf.errors import Failure
from dbx_tf.wire.events import Exited


def failure(worker_index: int, cause: str) -> Failure:
    return Failure(worker_index, f"host{worker_index}", cause, "text")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_echo_is_never_the_cause(order: tuple[int, int]) -> None:
    """The error that TensorFlow raises on the others loses, in whatever order the errors arrive."""
    log = FailureLog()
    for worker_index in order:
        if worker_index == 0:
            log.add(failure(0, "UnavailableError"), is_echo=True)
        else:
            log.add(failure(1, "ValueError"))
            log.add_exit(1, "host1", Exited(exit_code=1, log_tail=["last line"]))
    cause = log.first_cause()
    assert cause is not None
    assert (cause.worker_index, cause.cause_type, cause.log_tail) == (1, "ValueError", ("last line",))


def test_an_exit_may_overtake_its_reason() -> None:
    """The exit and the error come over two connections: whichever is first, the error is told with the output."""
    log = FailureLog()
    log.add_exit(1, "host1", Exited(exit_code=1, log_tail=["last line"]))
    assert log.first_cause() is None
    log.add(failure(1, "ValueError"))
    cause = log.first_cause()
    assert cause is not None
    assert (cause.cause_type, cause.log_tail) == ("ValueError", ("last line",))


def test_a_signal_needs_no_reason() -> None:
    """A process that was killed will not say why: nothing is waited for."""
    log = FailureLog()
    log.add_exit(1, "host1", Exited(exit_code=-9, log_tail=[]))
    cause = log.first_cause()
    assert cause is not None
    assert cause.cause_type == "ProcessKilled"


def test_the_earliest_of_several_causes_wins() -> None:
    """Two workers with errors of their own: the first one counts."""
    log = FailureLog()
    log.add(failure(1, "KeyError"), has_exited=True)
    log.add(failure(0, "ValueError"), has_exited=True)
    cause = log.first_cause()
    assert cause is not None
    assert cause.cause_type == "KeyError"


def test_an_echo_alone_waits_for_its_cause() -> None:
    """An echo is not told while the cause may still come, but it is when the run is over."""
    log = FailureLog()
    log.add(failure(0, "UnavailableError"), is_echo=True)
    log.add_exit(0, "host0", Exited(exit_code=1, log_tail=[]))
    assert log.first_cause() is None
    cause = log.first_cause(final=True)
    assert cause is not None
    assert cause.cause_type == "UnavailableError"


def test_a_cause_waits_a_moment_for_the_last_output() -> None:
    """The exit of the process brings its last lines; without it the cause is told after a moment."""
    log = FailureLog()
    log.add(failure(0, "ValueError"))
    assert log.first_cause() is None
    time.sleep(failures._DETAIL_GRACE_SECONDS + 0.1)
    assert log.first_cause() is not None


def test_a_process_that_dies_without_a_word_is_described() -> None:
    """Signals are named, and signal 9 comes with the usual reason."""
    assert describe_exit(3) == (
        "ProcessExited",
        "the training process ended with exit code 3 before train_fn had returned",
    )
    cause, text = describe_exit(-signal.SIGKILL)
    assert cause == "ProcessKilled"
    assert "signal 9 (SIGKILL)" in text
    assert "memory" in text
    assert "memory" not in describe_exit(-signal.SIGSEGV)[1]


def test_no_failure_no_cause() -> None:
    """A run that goes well has no cause of failure."""
    assert FailureLog().first_cause(final=True) is None
