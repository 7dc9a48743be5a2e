"""What a worker and the driver can say to each other, as small dataclasses.

Runs on: driver and workers.

Every message is one line of JSON, `{"kind": "EpochEnded", "epoch": 0, ...}`, and may be followed by a body of raw
bytes (a file, a pickled call). A worker speaks over two connections: its Spark task (`Role.TASK`) tells where it runs,
what the process printed and how it ended; its training process (`Role.TRAINING`) tells how training goes.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, Final

from dbx_tf.errors import DbxTfError

RELAY_SCHEME: Final = "dbx-tf"
"""Scheme of the MLflow addresses that lead through the driver."""
RELAYED_CALLS: Final = frozenset(
    """
    search_experiments create_experiment get_experiment get_experiment_by_name
    get_run create_run update_run_info search_runs get_metric_history
    log_metric log_param set_tag delete_tag log_batch log_inputs log_outputs record_logged_model
    create_logged_model finalize_logged_model get_logged_model set_logged_model_tags log_logged_model_params
    search_logged_models
    """.split()
)
"""Methods of MLflow's tracking store that user code may call from a worker."""
REGISTRY_CALLS: Final = frozenset(
    "create_registered_model create_model_version get_model_version set_registered_model_alias".split()
)
"""And of its model registry."""


class Role(StrEnum):
    """Which process of a worker holds a connection."""

    TASK = "task"
    TRAINING = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Anything that is said."""

    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        # slots=True makes a second class of each dataclass; the later one wins, which is the one in use.
        Event.kinds[cls.__name__] = cls


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Event):
    """First line of every connection, worker to driver."""

    token: str = field(repr=False)
    worker_index: int
    role: str
    attempt: int = 0
    """Which start of the training processes this one belongs to (0 for a task)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Event):
    """Driver to a new connection: its Hello was right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Event):
    """Task: this worker is here and holds a port for its TensorFlow server."""

    attempt: int
    host: str
    address: str
    executor: str
    versions: dict[str, str]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Event):
    """Driver to tasks: everybody is here, start the training process; the body is train_fn with its arguments."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoin(Event):
    """Driver to tasks: a port was taken before TensorFlow had it; end the process and join again."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Event):
    """Driver to training processes: everybody has finished, you may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Event):
    """Driver to tasks: end the training process and fail the task with this reason."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLines(Event):
    """Task: lines that the training process printed (its stdout and stderr)."""

    lines: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(Event):
    """Task: the training process is gone."""

    exit_code: int
    """As subprocess counts: negative for a signal."""
    log_tail: list[str]
    num_oom_kills: int = 0
    """Processes that the host's kernel killed for want of memory meanwhile (count)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Event):
    """Training process: the strategy is built, train_fn starts."""

    pid: int
    devices: list[str]
    num_replicas: int
    """Replicas on all workers (count)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PortTaken(Event):
    """Training process: TensorFlow could not bind the port that was held for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed(Event):
    """Training process: it has finished steps since it said so last, or computes outside of Keras's fit."""

    num_steps: int
    """All steps so far (count)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect(Event):
    """Driver to tasks: find out what the training process is doing."""


class Doing(StrEnum):
    """What a training process is found at."""

    WAITING = "waiting"
    """Inside TensorFlow, as while it waits for the other workers."""
    BUSY = "busy"
    """In code of the user's, or of Python's."""
    STOPPED = "stopped"
    """The system does not let it run."""
    ABSENT = "absent"
    """There is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected(Event):
    """Task: answer to Inspect."""

    doing: str
    """One of `Doing`."""
    where: str
    """In words."""
    stacks: str
    """A Python stack of each of its threads, as faulthandler writes them ("" if there is none to be had)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics(Event):
    """Training process: metric values of one step; `step` counts epochs for what Keras reports."""

    values: dict[str, float]
    step: int
    is_epoch: bool
    timestamp_ms: int = field(default_factory=lambda: int(time.time() * 1000))


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """A plain sentence that the driver should show once."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """Training process: train_fn, or what we do around it, raised."""

    cause_type: str
    cause_message: str
    traceback: str
    is_echo: bool
    """True for an error that another worker's failure causes here (`Collective ops is aborted by ...`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile(Event):
    """Chief: one file of the finished MLflow model; the body is its content."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """Training process: all is done; the chief's body is the pickled return value."""

    model_summary: str = ""
    value_error: str = ""
    """Why the return value could not be pickled ("" if it could)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Event):
    """Training process: a call of user code to MLflow; the body holds its pickled arguments."""

    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload(Event):
    """Training process: a file that user code logs to MLflow; the body is its content."""

    artifact_uri: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Event):
    """Driver to training process: answer to a Call or an Upload; the body is the pickled result."""

    error: str = ""


class ProtocolError(DbxTfError):
    """The other side said something that is not in this module."""


def encode(event: Event, body_bytes: int) -> bytes:
    """One line of JSON for an event that a body of `body_bytes` bytes follows."""
    message: dict[str, Any] = {"kind": type(event).__name__, "body_bytes": body_bytes, **asdict(event)}
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> tuple[Event, int]:
    """The event of a line, and the bytes of body that follow it.

    Raises:
        ProtocolError: If the line is no JSON object of a known kind with exactly its fields.
    """
    try:
        message = json.loads(line)
        cls = Event.kinds[message.pop("kind")]
        body_bytes = int(message.pop("body_bytes"))
        for name in (f.name for f in fields(cls) if str(f.type).startswith("tuple")):
            message[name] = tuple(message[name])
        event = cls(**message)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"not a message of this protocol ({type(error).__name__}: {error})") from None
    if body_bytes < 0:
        raise ProtocolError("a body can't have a negative size")
    return event, body_bytes
