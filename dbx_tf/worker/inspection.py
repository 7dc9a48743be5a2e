"""Finds out what a training process is doing, without its help: it may be stuck anywhere.

Runs on: workers; `allow` in the training process, the rest in the Spark task.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import Final

from dbx_tf.wire.events import Doing, Inspected

_STACKS: Final = "stacks.txt"
_ANSWER_SECONDS: Final = 2.0
"""The handler runs in C, whatever Python does; a process that has not written by then is kept from running."""
_STOPPED: Final = {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "D": "waits for its disk or network"}
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_TENSORFLOW: Final = "/tensorflow/python/"
_FEEDING: Final = "/tensorflow/python/ops/script_ops.py"
"""Calls Python from TensorFlow: generators and py_functions of the input."""


def allow(folder: Path) -> None:
    """Have this process write its threads' stacks into the folder when it gets SIGUSR2."""
    faulthandler.register(signal.SIGUSR2, (folder / _STACKS).open("a"), all_threads=True)


def inspect(pid: int, folder: Path) -> Inspected:
    """What the process is doing, from its stacks or, if it can't run, from the system."""
    state = _state(pid)
    if state in _STOPPED:
        return Inspected(doing=Doing.STOPPED, where=_STOPPED[state], stacks="")
    stacks = _stacks(pid, folder / _STACKS)
    if not stacks:
        return Inspected(doing=Doing.BUSY, where="has not begun yet, or does not react to signals", stacks="")
    doing, where = classify(stacks)
    return Inspected(doing=doing, where=where, stacks=stacks)


def classify(stacks: str) -> tuple[Doing, str]:
    """What the main thread is at, or the thread that makes its input.

    Args:
        stacks: As faulthandler writes them: the main thread last, in each the innermost frame first.
    """
    threads = [_FRAME.findall(thread) for thread in stacks.split("\n\n")]
    for frames in threads:
        feeds = any(_FEEDING in file for file, _, _ in frames)
        if feeds and _TENSORFLOW not in frames[0][0]:
            return Doing.BUSY, f"makes its input, at {_place(frames)}"
    frames = next((frames for frames in reversed(threads) if frames), [])
    if not frames:
        return Doing.BUSY, "runs no Python"
    own = next((_place([frame]) for frame in frames if "/site-packages/" not in frame[0]), "")
    if _TENSORFLOW in frames[0][0]:
        return Doing.WAITING, f"waits inside TensorFlow, called at {own}"
    return Doing.BUSY, f"is at {_place(frames)}"


def _place(frames: list[tuple[str, str, str]]) -> str:
    file, line, function = frames[0]
    return f"{file}, line {line}, in {function}"


def _state(pid: int) -> str:
    """As in /proc/pid/stat: R runs, S sleeps, T is stopped, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _stacks(pid: int, file: Path) -> str:
    if not file.exists():  # it has not come so far that it knows what the signal means
        return ""
    os.truncate(file, 0)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    deadline, text = time.monotonic() + _ANSWER_SECONDS, ""
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, text = text, file.read_text(errors="replace")
        if text and text == before:
            break
    return text


def count_oom_kills() -> int:
    """Processes that this host's kernel has killed for want of memory since it started (count), in any container."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found.group(1)) if found else 0
