"""Finds the first cause among the failures of one run.

Runs on: driver. When one worker fails, TensorFlow aborts the others, and whose error arrives first is chance.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from typing import Final

from dbx_tf.errors import Failure
from dbx_tf.wire.events import Exited

_ECHO_GRACE_SECONDS: Final = 5.0
"""How long an error that looks like another worker's failure waits for that failure to be told."""
_DETAIL_GRACE_SECONDS: Final = 3.0
"""How long a failure waits for what comes with it on another connection: the exit of its process, or its reason."""


@dataclass(slots=True)
class _Entry:
    failure: Failure
    is_echo: bool
    when: float
    has_reason: bool
    has_exited: bool


class FailureLog:
    """The first failure of each worker."""

    def __init__(self) -> None:
        self._entries: dict[int | None, _Entry] = {}

    @property
    def is_empty(self) -> bool:
        """True as long as nothing has failed."""
        return not self._entries

    def add(self, failure: Failure, *, is_echo: bool = False, has_exited: bool = False) -> None:
        """Record a failure; a worker's later ones are consequences of its first."""
        known = self._entries.get(failure.worker_index)
        if known is None:
            entry = _Entry(failure, is_echo, time.monotonic(), has_reason=True, has_exited=has_exited)
            self._entries[failure.worker_index] = entry
        elif not known.has_reason:  # the news of its exit overtook it
            known.failure, known.is_echo = replace(failure, log_tail=known.failure.log_tail), is_echo
            known.has_reason = True

    def add_exit(self, worker_index: int, host: str, exited: Exited) -> None:
        """Record that a training process ended, though it had not finished."""
        cause, text = describe_exit(exited.exit_code, exited.num_oom_kills)
        self.add(Failure(worker_index, host, cause, text))
        entry = self._entries[worker_index]
        entry.has_reason = (
            entry.failure.cause_type != cause or exited.exit_code < 0
        )  # nobody can tell of a signal but the system
        entry.failure, entry.has_exited = replace(entry.failure, log_tail=tuple(exited.log_tail)), True

    @property
    def is_echo(self) -> bool:
        """True if all that is known looks like the consequence of a failure that nobody told."""
        return bool(self._entries) and self._first().is_echo

    def _first(self) -> _Entry:
        return min(self._entries.values(), key=lambda entry: (entry.is_echo, entry.when))

    def first_cause(self, *, final: bool = False) -> Failure | None:
        """The failure that the others followed from, once it is known (with `final`: as far as it is known)."""
        if not self._entries:
            return None
        first = self._first()
        age = time.monotonic() - first.when
        has_details = first.has_reason and first.has_exited
        grace = _ECHO_GRACE_SECONDS if first.is_echo else 0.0 if has_details else _DETAIL_GRACE_SECONDS
        return first.failure if final or age > grace else None


def describe_exit(exit_code: int, num_oom_kills: int = 0) -> tuple[str, str]:
    """Class and text of a failure of which only the exit code is known (negative: killed by that signal)."""
    if exit_code >= 0:
        return "ProcessExited", f"the training process ended with exit code {exit_code} before train_fn had returned"
    text = f"the training process was killed by signal {-exit_code} ({signal.Signals(-exit_code).name})"
    if exit_code == -signal.SIGKILL and num_oom_kills:
        text += "; memory ran out on its server, whose kernel has killed for that; use servers with more memory, fewer "
        text += "workers on each, smaller batches, or data that is read while it trains"
    elif exit_code == -signal.SIGKILL:
        text += "; when nobody sent it, the system did because memory ran out"
    return "ProcessKilled", text
