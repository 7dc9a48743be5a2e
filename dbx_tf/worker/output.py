"""Passes on what a training process prints, while it prints it.

Runs on: workers, in a thread of the Spark task.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import sys
from collections import deque
from typing import IO, Final

from dbx_tf.wire.channel import Outbox
from dbx_tf.wire.events import LogLines

LOG_TAIL_LINES: Final = 100
_MAX_LINE_BYTES: Final = 65_536
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")


def pump_output(output: IO[bytes] | None, tail: deque[str], logs: Outbox, echo: bool) -> None:
    """Pass output on as it comes: to the driver, to the tail, and to this task's own stderr."""
    pending, decoder = "", codecs.getincrementaldecoder("utf-8")("replace")
    while output is not None and (chunk := os.read(output.fileno(), _MAX_LINE_BYTES)):
        *lines, pending = (pending + decoder.decode(chunk)).split("\n")
        if len(pending) > _MAX_LINE_BYTES:
            lines, pending = [*lines, pending], ""
        _pass_on(lines, tail, logs, echo=echo)
    _pass_on([pending] if pending else [], tail, logs, echo=echo)


def _pass_on(lines: list[str], tail: deque[str], logs: Outbox, *, echo: bool) -> None:
    # A progress bar rewrites its line: what stands there in the end is what counts.
    lines = [_COLOURS.sub("", line.rstrip("\r\x08").rpartition("\r")[2].rpartition("\x08")[2]) for line in lines]
    if lines:
        tail.extend(lines)
        logs.put(LogLines(lines=lines))
    if lines and echo:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("\n".join(lines) + "\n")
