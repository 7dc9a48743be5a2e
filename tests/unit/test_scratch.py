"""A worker's folder goes away with the worker, however that ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, tempfile
tempfile.tempdir = sys.argv[1]
from dbx_tf.worker import scratch
if sys.argv[2] == "alone":  # as if the whole host had failed
    scratch._removed_after_us = lambda folder: open(os.devnull)
with scratch.scratch_folder() as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    input()
"""


def folder_of(process: "subprocess.Popen[str]") -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def start(folder: Path, how: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SCRIPT, str(folder), how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


def is_gone_soon(folder: Path) -> bool:
    deadline = time.monotonic() + 10
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_workers_folder_goes_away(tmp_path: Path, number: signal.Signals) -> None:
    """Nobody in the killed process can clean up; a process that outlives it does."""
    with start(tmp_path, "watched") as process:
        folder = folder_of(process)
        assert (folder / "file").exists()
        process.send_signal(number)
        assert is_gone_soon(folder)


def test_a_worker_that_ends_removes_its_folder(tmp_path: Path) -> None:
    """In the ordinary way, and at once."""
    with start(tmp_path, "watched") as process:
        folder = folder_of(process)
        process.communicate("\n", timeout=20)
    assert not folder.exists()


def test_what_a_failed_host_left_goes_with_the_next_worker(tmp_path: Path) -> None:
    """Only folders whose owner is gone: the lock tells."""
    with start(tmp_path, "watched") as living, start(tmp_path, "alone") as dead:
        kept, left = folder_of(living), folder_of(dead)
        dead.kill()
        dead.wait(20)
        assert (left / "file").exists()
        with start(tmp_path, "watched") as other:
            folder_of(other)
            assert is_gone_soon(left)
            other.communicate("\n", timeout=20)
        assert (kept / "file").exists()
        living.communicate("\n", timeout=20)
