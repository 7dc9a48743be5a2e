"""What a signal may break into."""

import os
import signal
import threading

import pytest

from dbx_tf.driver.interrupts import sigterm_as_exit, uninterrupted


def test_an_interrupt_ends_the_wait_but_not_the_call() -> None:
    """The driver goes on to its end at once, and the call, say a transaction, comes to its own."""
    go_on, done = threading.Event(), threading.Event()

    def call() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        assert go_on.wait(20)
        done.set()

    with sigterm_as_exit(), pytest.raises(SystemExit) as caught:
        uninterrupted(call)
    assert caught.value.code == 128 + signal.SIGTERM
    assert not done.is_set()
    go_on.set()
    assert done.wait(20)


def test_what_the_call_returns_or_raises_is_the_callers() -> None:
    assert uninterrupted(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        uninterrupted(divmod, 7, 0)
