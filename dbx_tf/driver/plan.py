"""What a run would do, and all that stands in its way, found out before anything starts.

Runs on: driver.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dbx_tf.cluster import SlotLayout, without_password
from dbx_tf.driver import checks, probing
from dbx_tf.driver.launch import InProcessLauncher, Launcher, LocalLauncher
from dbx_tf.driver.payload import pack
from dbx_tf.driver.place import RunPlace, find_place
from dbx_tf.driver.reading import Used, read
from dbx_tf.driver.settings import Settings
from dbx_tf.driver.tracking import check_server
from dbx_tf.errors import ClusterError, ConfigError, Problem, raise_problems
from dbx_tf.worker.environment import package_versions
from dbx_tf.worker.probe import Finding

_PASSED_ON: Final = ("TF_", "KERAS_", "NCCL_")
_KEPT_BACK: Final = ("TF_CONFIG", "TF_GRPC_REUSE_PORT")
_BATCH_ARGUMENTS: Final = ("global_batch_size", "batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What would run where, and what is wrong with it."""

    launcher: str
    """How workers would be started: `MirroredStrategyRunner`, `mapInArrow on Spark Connect`, `local`, `in process`."""
    num_slots: int
    num_workers: int
    """Workers, each of which is a task (count)."""
    gpus_per_worker: int
    """GPUs of each worker (count); 0 for CPU training."""
    slots_available: int | None
    """Tasks this cluster can run at once (count); None where nothing limits them."""
    num_hosts: int | None
    """Hosts that could take part (count); None where the session does not tell."""
    num_hosts_required: int
    """Hosts that the workers have to be on (count), `require_hosts`."""
    num_executors: int | None
    """Spark's executors (count); None without Spark, and where the session does not tell."""
    cores: int | None
    """Cores of all of them (count); None where the session does not tell."""
    threads_per_worker: int | None
    """TensorFlow's threads within an operation (count); None: it takes a thread for each core of the server."""
    global_batch_size: int | None
    """Rows of a step over all workers, if train_fn has an argument `batch_size` or `global_batch_size`."""
    strategy: str
    """What train_fn trains with."""
    tracking_uri: str | None
    versions: Mapping[str, str]
    """Versions on the driver."""
    findings: tuple[Finding, ...]
    """What the workers themselves have told, if they were asked."""
    problems: tuple[Problem, ...]
    """Errors before warnings."""
    _payload: bytes = field(default=b"", repr=False)
    _start: Callable[[], Launcher] | None = field(default=None, repr=False)
    _env: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def num_replicas(self) -> int:
        """Copies of the model that train in sync (count)."""
        return self.num_workers * max(self.gpus_per_worker, 1)

    @property
    def per_replica_batch_size(self) -> int | None:
        """Rows of a step on each replica; on some it is one less if the global batch does not divide evenly."""
        return None if self.global_batch_size is None else -(-self.global_batch_size // self.num_replicas)

    def check(self) -> None:
        """Refuse to run if there are errors.

        Raises:
            ConfigError: If an argument is wrong.
            ClusterError: If the cluster or session can't run it.
            TrackingError: If only MLflow can't.
        """
        raise_problems(self.problems)

    def make_launcher(self) -> Launcher:
        """The launcher for a run of this plan, which must have passed `check`."""
        assert self._start is not None
        return self._start()

    def __str__(self) -> str:
        rows = [
            ("launcher", self.launcher),
            ("cluster", self._cluster()),
            ("slots", f"{self.num_slots}{_of(self.slots_available, 'available')}"),
            ("workers", f"{self.num_workers}, {self._device()}, {self._threads()}"),
            ("replicas", f"{self.num_replicas} in sync, {self.strategy}"),
            ("tracking", without_password(self.tracking_uri or "off")),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())),
        ]
        if self.global_batch_size is not None:
            text = f"{self.global_batch_size} rows a step, {self.per_replica_batch_size} on each replica"
            rows.insert(5, ("batch", text))
        lines = [f"{name:<10}{value}" for name, value in rows]
        for finding in self.findings:
            gpus, free = _count(finding.num_gpus, "GPU"), finding.free_disk_bytes >> 30
            where = f"{finding.host}, executor {finding.executor}"
            lines.append(f"{f'worker {finding.worker_index}':<10}{where}, {gpus}, {free} GiB free on its disk")
        lines += [f"{problem.level.upper()}: {problem}" for problem in self.problems]
        return "\n".join(lines if self.problems else [*lines, "no problems found"])

    def _cluster(self) -> str:
        known = ((self.num_hosts, "host"), (self.num_executors, "executor"), (self.cores, "core"))
        parts = [_count(number, noun) for number, noun in known if number is not None]
        return ", ".join(parts) or "this session does not tell its hosts"

    def _device(self) -> str:
        return f"{_count(self.gpus_per_worker, 'GPU')} each" if self.gpus_per_worker else "CPU"

    def _threads(self) -> str:
        if self.threads_per_worker is None:
            return "a thread for each core of its server"
        return f"{_count(self.threads_per_worker, 'thread')} each"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _of(number: int | None, what: str) -> str:
    return "" if number is None else f" ({number} {what})"


def make_plan(
    settings: Settings, train_fn: Callable[..., Any] | None, kwargs: Mapping[str, Any], *, probe: bool = False
) -> RunPlan:
    """Check everything and collect the problems.

    Nothing is started but, where there is none yet, a Spark session, and with `probe` a job that asks the workers.
    """
    problems = list(settings.problems())
    versions, env = package_versions(), passed_on(settings.env)
    place, payload, used = RunPlace(SlotLayout(num_tasks=1, gpus_per_task=0)), b"", Used()
    if train_fn is not None:
        payload, found = pack(train_fn, kwargs)
        problems += found
        used = read(train_fn, kwargs) if payload else used
    if not problems:  # with an argument that is wrong, no Spark session and no server is asked to find out more
        if settings.tracking.enabled:
            problems += check_server(settings.tracking)
        try:
            place = find_place(settings, problems)
        except ConfigError as error:
            problems += error.problems
    launcher = place.start() if place.start else None
    num_workers, gpus = place.slots.num_tasks, place.slots.gpus_per_task
    problems += checks.check_hosts(settings.require_hosts, num_workers, place.num_hosts)
    problems += checks.check_versions(versions, num_workers, env)
    problems += checks.check_code(used, env)
    if launcher is not None:
        is_elsewhere = launcher.has_servers and set(place.executors or ()) != {launcher.host}
        problems += checks.check_paths(used, has_servers=is_elsewhere)
    num_hosts_required = (place.num_hosts or 1) if settings.require_hosts == "all" else settings.require_hosts or 1
    findings: Sequence[Finding] = ()
    if probe and launcher is not None and not any(problem.level == "error" for problem in problems):
        try:
            findings = probing.ask(
                launcher, place.slots, settings.gpu_resource_name, env, used, settings.start_timeout_seconds
            )
            own = package_versions(*probing.OTHER_PACKAGES)
            problems += probing.judge(findings, own, gpus, num_hosts_required)
        except ClusterError as error:
            problems.append(probing.refusal(error))
    is_local = settings.local_mode or settings.in_process
    threads = env.get("TF_NUM_INTRAOP_THREADS", "")
    return RunPlan(
        launcher=launcher.name if launcher else _launcher_name(settings),
        num_slots=settings.num_slots,
        num_workers=num_workers,
        gpus_per_worker=gpus,
        slots_available=place.available,
        num_hosts=place.num_hosts,
        num_hosts_required=num_hosts_required,
        num_executors=len(place.executors) if place.executors and not is_local else None,
        cores=place.cores,
        threads_per_worker=int(threads) if threads.isdigit() and int(threads) else None,
        global_batch_size=_batch_size(used.arguments),
        strategy=checks.describe_strategy(used, num_workers),
        tracking_uri=settings.tracking.resolved_uri() if settings.tracking.enabled else None,
        versions=versions,
        findings=tuple(findings),
        problems=_in_order(problems),
        _payload=payload,
        _start=place.start,
        _env=env,
    )


def _in_order(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """Errors before warnings, each once."""
    return tuple(sorted(dict.fromkeys(problems), key=lambda problem: problem.level != "error"))


def _batch_size(arguments: Mapping[str, Any]) -> int | None:
    given = [arguments.get(name) for name in _BATCH_ARGUMENTS]
    return next((size for size in given if type(size) is int and size > 0), None)


def _launcher_name(settings: Settings) -> str:
    return InProcessLauncher.name if settings.in_process else LocalLauncher.name if settings.local_mode else "Spark"


def passed_on(env: Mapping[str, str]) -> dict[str, str]:
    """The driver's settings for TensorFlow, Keras and NCCL, and what the caller adds."""
    own = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON) and name not in _KEPT_BACK}
    return {**own, **env}
