"""Says in words why a run does not go on, from what its workers were found doing.

Runs on: driver. Pure: the supervisor has asked the workers before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dbx_tf.cluster import Topology
from dbx_tf.driver.workers import Worker, Workers
from dbx_tf.errors import ClusterError, Failure
from dbx_tf.wire.events import Doing

_MAX_STACKS: Final = 6_000
"""Characters of each worker's stacks in an error; the main thread, which comes last, is always among them."""
_SILENT: Final = "does not answer: its server is frozen or cut off from the network, or its Spark task is stopped"

TASK_LOST: Final = (
    "the Spark task was lost: its Python worker, its executor or its server is gone; look whether the server was taken "
    "away (spot) or ran out of memory, and into the executor's log"
)
NO_PORT: Final = (
    "TensorFlow could not bind {} or {} ports before it: all of them were taken; a worker needs a free port; look for "
    "a program that binds ports on this host"
)


def launch_ended(error: BaseException | None) -> Failure:
    """What to say when Spark's job ended and no worker told why."""
    if isinstance(error, ClusterError):
        return Failure(cause_type="ClusterError", cause_message=str(error))
    return Failure(cause_type="SparkJobFailed", cause_message=str(error or "the tasks ended without a word"))


def too_few_hosts(placement: Topology, num_hosts: int) -> Failure:
    """What to say when the workers landed on fewer hosts than they have to: where, and how to spread them."""
    text = f"require_hosts={num_hosts}, but {placement.advice() or placement}"
    return Failure(cause_type="ClusterError", cause_message=text)


def not_started(workers: Workers, seconds: float) -> Failure:
    """What to say when not all are ready in time: who was never started, or has no strategy."""
    absent = [str(worker.index) for worker in workers if worker.joined is None]
    waiting = [worker for worker in workers if worker.joined is not None and worker.ready is None]
    text = f"not all workers were ready after start_timeout_seconds={seconds:g}"
    if absent:
        text += f"; Spark never started the task of worker {', '.join(absent)}: are all servers up, and their slots "
        text += "free of other jobs?"
    elif waiting:
        text += f"; no strategy on {_list(waiting)}: can the workers reach each other's ports?"
    return Failure(cause_type="StartTimeout", cause_message=text, traceback=_stacks(waiting))


def stalled(workers: Workers, seconds: float) -> Failure:
    """What to say when no worker has finished a step for so long: who waits, and for whom."""
    done = [worker for worker in workers if worker.finished is not None]
    others = [worker for worker in workers if worker.finished is None]
    waiting = [w for w in others if w.inspected is not None and w.inspected.doing == Doing.WAITING]
    awaited = [worker for worker in others if worker not in waiting]
    text = f"no worker has finished a step for stall_timeout_seconds={seconds:g}: "
    if awaited:
        text += _list(awaited)
        text += f"; waiting for that: {_names(waiting)}" if waiting else ""
        text += "; if that is as it should be, set a longer stall_timeout_seconds"
    elif done and waiting:
        text += f"{_names(done)} has finished, but {_list(waiting)}, probably for the other in a collective; every "
        text += "worker has to make the same steps, and to stop in the same epoch"
    elif waiting:
        text += f"{_list(waiting)}: in a step that does not end, for input that does not come, or for each other in "
        text += "different collectives; if a step takes so long, set a longer stall_timeout_seconds"
    else:
        text += "all have finished, but their processes don't end"
    blamed = (awaited or waiting or done)[0]
    return Failure(blamed.index, blamed.host, "Stalled", text, traceback=_stacks(others))


def out_of_time(workers: Workers, seconds: float) -> Failure:
    """What to say when the whole run takes too long."""
    text = f"the run was ended after timeout_seconds={seconds:g}"
    return Failure(cause_type="Timeout", cause_message=text, traceback=_stacks(list(workers)))


def unresponsive(workers: Workers) -> Failure | None:
    """The worker that made the others fail without a word of its own: it can't run, or can't be reached."""
    for worker in workers:
        if worker.task is None or worker.exited is not None:
            continue
        if worker.inspected is None or worker.inspected.doing == Doing.STOPPED:
            what = worker.inspected.where if worker.inspected else _SILENT
            text = f"the worker {what}, so the others gave it up"
            return Failure(worker.index, worker.host, "Unresponsive", text)
    return None


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(f"worker {worker.index} on host {worker.host}" for worker in workers)


def _list(workers: Sequence[Worker]) -> str:
    return ", ".join(f"{_names([w])} {w.inspected.where if w.inspected else _SILENT}" for w in workers)


def _stacks(workers: Sequence[Worker]) -> str:
    found = [(worker, worker.inspected.stacks) for worker in workers if worker.inspected is not None]
    return "\n".join(f"{_names([worker])}:\n{stacks[-_MAX_STACKS:]}" for worker, stacks in found if stacks)
