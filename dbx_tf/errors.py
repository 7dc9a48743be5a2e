"""Every error that dbx_tf raises on purpose.

Runs on: driver and workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that stands in the way of a run."""

    level: Literal["error", "warning"]
    """`error` refuses the run, `warning` is only told."""
    what: str
    """What was given or found."""
    possible: str
    """What would be possible instead."""
    fix: str
    """What to do."""

    def __str__(self) -> str:
        return f"{self.what}; {self.possible}; {self.fix}"


class DbxTfError(Exception):
    """Base of every error raised by dbx_tf."""

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default protocol calls cls(*args) and would lose, or choke on, the keyword-only fields.
        return _rebuild, (type(self), self.message, dict(self.__dict__))


def _rebuild(cls: type[DbxTfError], message: str, state: dict[str, Any]) -> DbxTfError:
    error = cls(message)
    error.__dict__.update(state)
    return error


class _PlanError(DbxTfError):
    def __init__(self, message: str = "", *, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message, problems=tuple(problems))
        self.problems: tuple[Problem, ...]


class ConfigError(_PlanError, ValueError):
    """An argument is wrong: raised on the driver, before any Spark job.

    Attributes:
        problems: Every problem found, not only the first.
    """


class ClusterError(_PlanError, RuntimeError):
    """This cluster or session can't run it: raised on the driver, before training.

    Attributes:
        problems: Every problem found, not only the first.
    """


@dataclass(frozen=True, slots=True)
class Failure:
    """What is known of the first cause of a failed run."""

    worker_index: int | None = None
    host: str = ""
    cause_type: str = ""
    cause_message: str = ""
    traceback: str = field(default="", repr=False)
    log_tail: tuple[str, ...] = field(default=(), repr=False)


class WorkerFailedError(DbxTfError, RuntimeError):
    """Training failed on a worker.

    Attributes:
        worker_index: The worker that failed first (None if Spark ended the job before any worker could speak).
        host: Its host name.
        cause_type: Class name of the exception, or `ProcessKilled`, `ProcessExited`, `TaskLost`, `Unresponsive`,
            `Stalled`, `Timeout`, `SparkJobFailed`.
        cause_message: Text of the exception.
        traceback: The remote traceback ("" if the process died without one).
        log_tail: Its last lines of output (at most 100 lines).
        run_id: The MLflow run that holds what was logged (None if tracking is off).
    """

    def __init__(self, message: str = "", *, failure: Failure = Failure(), run_id: str | None = None) -> None:
        super().__init__(message)
        self.worker_index = failure.worker_index
        self.host = failure.host
        self.cause_type = failure.cause_type
        self.cause_message = failure.cause_message
        self.traceback = failure.traceback
        self.log_tail = failure.log_tail
        self.run_id = run_id

    @classmethod
    def from_failure(cls, failure: Failure, run_id: str | None) -> WorkerFailedError:
        """Compose the message a person reads in the notebook: cause first, then where, then the details."""
        where = f"worker {failure.worker_index}" if failure.worker_index is not None else "the Spark job"
        if failure.host:
            where += f" on host {failure.host}"
        parts = [f"{failure.cause_type}: {failure.cause_message} [{where}]"]
        if failure.traceback:
            parts.append("Traceback of the worker:\n" + failure.traceback.rstrip())
        if failure.log_tail and not failure.traceback:
            parts.append("Last lines of its output:\n" + "\n".join(failure.log_tail[-20:]))
        if run_id:
            parts.append(f"MLflow run: {run_id} (each worker's full log is in its artifacts, folder logs)")
        return cls("\n\n".join(parts), failure=failure, run_id=run_id)


class TrackingError(DbxTfError, RuntimeError):
    """MLflow refused or could not be reached.

    Attributes:
        run_id: The run concerned, if one was open.
    """

    def __init__(self, message: str = "", *, run_id: str | None = None) -> None:
        super().__init__(message)
        self.run_id = run_id


def raise_problems(problems: tuple[Problem, ...]) -> None:
    """Raise one error with all the problems of level `error`, if there are any.

    Raises:
        ConfigError: If one of them is an `ArgumentProblem`.
        ClusterError: Else, if one of them comes from the cluster or session.
        TrackingError: If all of them are MLflow's.
    """
    errors = [p for p in problems if p.level == "error"]
    if not errors:
        return
    text = str(errors[0]) if len(errors) == 1 else "\n".join(f"{i}. {p}" for i, p in enumerate(errors, 1))
    if all(isinstance(p, TrackingProblem) for p in errors):
        raise TrackingError(text)
    kind = ConfigError if any(isinstance(p, ArgumentProblem) for p in errors) else ClusterError
    raise kind(text, problems=problems)


class ArgumentProblem(Problem):
    """A problem that lies in what the caller passed, not in the cluster."""

    __slots__ = ()


class TrackingProblem(Problem):
    """A problem with the tracking server."""

    __slots__ = ()
