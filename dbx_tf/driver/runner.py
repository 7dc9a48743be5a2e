"""Runner: hand it a train_fn, and every server trains.

Runs on: driver. Composition only: the plan, the tracker, the supervisor and the launcher do the work.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from dbx_tf.cluster import Topology, without_password
from dbx_tf.driver.interrupts import sigterm_as_exit
from dbx_tf.driver.journal import Journal
from dbx_tf.driver.launch import Deputy
from dbx_tf.driver.limits import Limits
from dbx_tf.driver.plan import RunPlan, make_plan
from dbx_tf.driver.result import RunResult
from dbx_tf.driver.secrets import Secrets
from dbx_tf.driver.settings import Settings
from dbx_tf.driver.supervisor import Outcome, Supervisor
from dbx_tf.driver.tracker import NullTracker, Tracker
from dbx_tf.errors import ClusterError, Failure, TrackingError, WorkerFailedError
from dbx_tf.worker.scratch import scratch_folder
from dbx_tf.worker.task import Program

P = ParamSpec("P")
R = TypeVar("R")

_SETUP_CAUSES: Final = ("ClusterError", "StartTimeout")
_MAX_TAG: Final = 5000
"""Characters of a tag's value that every MLflow server takes."""


@dataclass(frozen=True, kw_only=True)
class Runner(Settings):
    """Trains on several workers at once what was written for one; its fields are those of `Settings`."""

    def plan(self, train_fn: Callable[..., Any] | None = None, /, *, probe: bool = False, **kwargs: Any) -> RunPlan:
        """Find out what would run where, and what stands in the way.

        Nothing is started but, where there is none yet, a Spark session.

        Args:
            train_fn: Check this function too: its arguments, whether it can be shipped, and what its code names.
            probe: Ask the workers themselves, in a short Spark job: what is installed there, whether they can reach
                each other and the driver, their GPUs and disks, and whether they see the paths among the arguments.
            kwargs: Its arguments.
        """
        return make_plan(self, train_fn, kwargs, probe=probe)

    def get_num_tasks(self) -> int:
        """Spark tasks, which are workers, that a run uses (count)."""
        return self.plan().num_workers

    def run(self, train_fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> RunResult[R]:
        """Run train_fn on every worker as one training, and log it to MLflow.

        Args:
            train_fn: Keras or TensorFlow code for one machine. It may build MultiWorkerMirroredStrategy or
                MirroredStrategy, or no strategy at all. `batch_size` means the global batch.
            args: Not taken: as with MirroredStrategyRunner, arguments are passed by name.
            kwargs: Its arguments.

        Returns:
            What the chief's train_fn returned, the metrics, the model and where all of it ran.

        Raises:
            ConfigError: If an argument is wrong; before anything starts.
            ClusterError: If this cluster or session can't run it; before training starts.
            TrackingError: If MLflow does not take the run, or refuses the finished model.
            WorkerFailedError: If training failed; carries the first cause, where it happened and its log.
        """
        if args:
            raise TypeError(f"run() takes the arguments of train_fn by name, but was given {len(args)} by position")
        plan = make_plan(self, train_fn, kwargs)
        plan.check()
        with _Run(self, plan, kwargs) as run:
            return run.complete()


class _Run:
    """One run from its start to its end; leaves nothing behind, whichever way it ends."""

    def __init__(self, runner: Runner, plan: RunPlan, kwargs: Mapping[str, Any]) -> None:
        self._runner, self._plan, self._kwargs = runner, plan, kwargs
        self._secrets = Secrets({**runner.env, **kwargs})
        self._started = time.monotonic()
        self._limits = Limits(
            start_timeout_seconds=runner.start_timeout_seconds,
            stall_timeout_seconds=runner.stall_timeout_seconds,
            timeout_seconds=runner.timeout_seconds,
            num_hosts=plan.num_hosts_required,
        )
        self._seed = secrets.randbelow(2**31)
        self._status = "FAILED"

    def __enter__(self) -> _Run:
        with contextlib.ExitStack() as stack:
            stack.enter_context(sigterm_as_exit())
            folder = stack.enter_context(scratch_folder())
            tracking = self._runner.tracking
            self._tracker = Tracker(tracking, self._secrets) if tracking.enabled else NullTracker()
            stack.callback(lambda: self._tracker.finish(self._status))
            self._launcher = self._plan.make_launcher()
            self._journal = Journal(folder, self._tracker, _show, self._secrets)
            plan = self._plan
            self._supervisor = Supervisor(
                self._launcher,
                plan.num_workers,
                plan.versions,
                self._journal,
                self._tracker,
                plan._payload,
                self._limits,
            )
            stack.callback(self._supervisor.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._status = "FINISHED"
        elif not issubclass(kind, Exception):  # KeyboardInterrupt, SystemExit
            self._status = "KILLED"
        with self._stack, self._told("the workers' logs"):
            if self._journal.notices:
                self._tracker.set_tags({"dbx_tf.notices": "\n".join(self._journal.notices)[:_MAX_TAG]})
            if error is not None:
                reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                self._supervisor.stop(reason)
                self._launcher.finish()
                self._tracker.set_tags({"dbx_tf.error": reason[:_MAX_TAG]})
            self._tracker.log_folder(self._journal.log_folder, "logs")

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Tell what could not be logged: a tracking server that is away must not cost a training."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # MLflow raises what its store raises
            self._journal.add_notice(f"{what} could not be written to MLflow ({type(error).__name__}: {error})")

    def complete(self) -> RunResult[Any]:
        """Start the workers, wait for them, and log what is known at the end."""
        self._log_start()
        self._launcher.start(self._program(), self._make_deputy, self._supervisor.take)
        outcome = self._supervisor.wait(self._on_ready)
        if outcome.failure is not None:
            raise _to_error(outcome.failure, self._tracker.run_id) from None
        self._launcher.finish()
        topology = self._supervisor.topology
        assert topology is not None  # without a failure, all workers were ready
        self._log_end(outcome)
        return RunResult(
            run_id=self._tracker.run_id,
            model_uri=self._tracker.model_uri,
            history=self._journal.history,
            topology=topology,
            seconds=time.monotonic() - self._started,
            num_restarts=self._supervisor.num_restarts,
            notices=tuple(self._journal.notices),
            _value=outcome.value,
            _value_error=outcome.value_error,
        )

    def _program(self) -> Program:
        tracking = self._runner.tracking
        addresses = (tracking.resolved_uri(), tracking.registry_uri()) if tracking.enabled else ()
        return Program(
            address=self._supervisor.address,
            num_workers=self._plan.num_workers,
            gpus_per_worker=self._plan.gpus_per_worker,
            gpu_resource_name=self._runner.gpu_resource_name,
            env=dict(self._plan._env),
            python_path=tuple(str(Path(entry).resolve()) for entry in sys.path),
            seed=self._seed,
            export_model=tracking.enabled and tracking.log_model,
            mlflow_addresses=tuple(map(without_password, addresses)),
            echo=self._launcher.has_servers,
        )

    def _make_deputy(self) -> Deputy:
        return Deputy(self._plan._payload, self._plan.versions, self._tracker.snapshot(), self._limits)

    def _log_start(self) -> None:
        for problem in self._plan.problems:  # warnings: errors have refused the run
            self._journal.add_notice(str(problem))
        names = ("num_slots", "num_workers", "gpus_per_worker", "launcher")
        own = {f"dbx_tf.{name}": getattr(self._plan, name) for name in names}
        versions = {f"dbx_tf.version.{name}": version for name, version in self._plan.versions.items()}
        try:
            self._tracker.log_params({**self._kwargs, **own, "dbx_tf.seed": self._seed})
            self._tracker.set_tags(versions)
        except Exception as error:
            text = f"MLflow took the run but not its parameters ({type(error).__name__}: {error})"
            raise TrackingError(self._secrets.mask(text), run_id=self._tracker.run_id) from error

    def _on_ready(self, topology: Topology) -> None:
        _show(str(topology))
        if self._launcher.has_servers and (advice := topology.advice()) is not None:
            self._journal.add_notice(advice)
        places = {f"dbx_tf.worker_{w.worker_index}": f"{w.host} {w.address} pid {w.pid}" for w in topology.workers}
        with self._told("the topology"):
            self._tracker.set_tags({"dbx_tf.topology": str(topology), **places})
            self._tracker.log_text(topology.to_json(), "topology.json")

    def _log_end(self, outcome: Outcome) -> None:
        journal, tracker = self._journal, self._tracker
        if outcome.value_error:
            journal.add_notice(f"train_fn returned {outcome.value_error}; the run itself is complete")
        journal.add_returned(outcome.value)
        with self._told("history.json and model_summary.txt"):
            tracker.log_text(json.dumps(journal.history), "history.json")
            if outcome.model_summary:
                tracker.log_text(outcome.model_summary, "model_summary.txt")
        if journal.model_folder.exists():
            self._log_model()
        if (lost := tracker.lost()) is not None:
            journal.add_notice(lost)

    def _log_model(self) -> None:
        folder = self._journal.model_folder
        try:
            self._tracker.log_model(folder)
        except TrackingError as error:
            kept = tempfile.mkdtemp(prefix="dbx_tf-model-")
            shutil.copytree(folder, kept, dirs_exist_ok=True)
            text = f"{error}; the trained model is kept on the driver in {kept}"
            if self._runner.tracking.registered_model_name:
                raise TrackingError(text, run_id=self._tracker.run_id) from error
            self._journal.add_notice(text)


def _to_error(failure: Failure, run_id: str | None) -> Exception:
    if failure.cause_type in _SETUP_CAUSES:
        where = "" if failure.worker_index is None else f" [worker {failure.worker_index} on host {failure.host}]"
        return ClusterError(failure.cause_message + where)
    return WorkerFailedError.from_failure(failure, run_id)


def _show(text: str) -> None:
    print(f"dbx_tf: {text}", flush=True)
