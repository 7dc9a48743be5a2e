"""What a training process is doing, found out from outside of it."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dbx_tf.wire.events import Doing
from dbx_tf.worker.inspection import classify, count_oom_kills, inspect

TENSORFLOW = "/x/site-packages/tensorflow/python"
WAITS = f"""Current thread 0x01 (most recent call first):
  File "{TENSORFLOW}/eager/execute.py", line 53 in quick_execute
  File "/x/site-packages/keras/src/trainers/trainer.py", line 399 in fit
  File "/home/me/train.py", line 12 in train_fn"""
SLEEPS = """Current thread 0x01 (most recent call first):
  File "/home/me/train.py", line 7 in on_epoch_begin
  File "/x/site-packages/keras/src/callbacks/callback_list.py", line 30 in on_epoch_begin"""
MAKES_INPUT = f"""Thread 0x02 (most recent call first):
  File "/home/me/train.py", line 20 in rows
  File "{TENSORFLOW}/ops/script_ops.py", line 270 in __call__

"""
INPUT_IN_TENSORFLOW = f"""Thread 0x02 (most recent call first):
  File "{TENSORFLOW}/ops/script_ops.py", line 270 in __call__

"""


@pytest.mark.parametrize(
    ("stacks", "doing", "where"),
    [
        (WAITS, Doing.WAITING, "waits inside TensorFlow, called at /home/me/train.py, line 12, in train_fn"),
        (SLEEPS, Doing.BUSY, "is at /home/me/train.py, line 7, in on_epoch_begin"),
        (MAKES_INPUT + WAITS, Doing.BUSY, "makes its input, at /home/me/train.py, line 20, in rows"),
        (INPUT_IN_TENSORFLOW + WAITS, Doing.WAITING, "waits inside TensorFlow"),
        ("Thread 0x02 (most recent call first):\n  <no Python frame>", Doing.BUSY, "runs no Python"),
    ],
)
def test_who_waits_is_told_from_who_is_waited_for(stacks: str, doing: Doing, where: str) -> None:
    """Inside of TensorFlow a worker waits for the others; in the user's code, or its input's, it is waited for."""
    found, text = classify(stacks)
    assert found == doing
    assert text.startswith(where)


@contextmanager
def process(folder: Path, prepare: str) -> Iterator[subprocess.Popen[str]]:
    """A process that sleeps in a function called `sleep_long`."""
    script = f"""
import time
from pathlib import Path
from dbx_tf.worker.inspection import allow
{prepare}
def sleep_long():
    print("ready", flush=True)
    time.sleep(600)
sleep_long()
"""
    child = subprocess.Popen([sys.executable, "-c", script], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    try:
        yield child
    finally:
        child.kill()
        child.wait(20)


def test_a_process_is_inspected_again_and_again(tmp_path: Path) -> None:
    """Its place is found, with the stack; it goes on unharmed."""
    with process(tmp_path, "allow(Path('.'))") as child:
        for _ in range(2):
            found = inspect(child.pid, tmp_path)
            assert found.doing == Doing.BUSY
            assert "in sleep_long" in found.where
            assert found.stacks.count("sleep_long") == 1
        assert child.poll() is None


def test_a_stopped_process_is_told(tmp_path: Path) -> None:
    """SIGSTOP is seen from the system, as the process can't answer."""
    with process(tmp_path, "allow(Path('.'))") as child:
        child.send_signal(signal.SIGSTOP)
        while inspect(child.pid, tmp_path).doing != Doing.STOPPED:  # the signal takes a moment
            time.sleep(0.05)
        assert "SIGSTOP" in inspect(child.pid, tmp_path).where


def test_a_process_that_has_not_begun_is_left_alone(tmp_path: Path) -> None:
    """Before it knows the signal, the signal would kill it."""
    with process(tmp_path, "") as child:
        assert "has not begun yet" in inspect(child.pid, tmp_path).where
        assert child.poll() is None


def test_the_kernel_counts_what_it_kills() -> None:
    """The count is there on Linux, and does not go down."""
    before = count_oom_kills()
    assert 0 <= before <= count_oom_kills()
