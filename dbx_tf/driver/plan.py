"""What a run would do, and all that stands in its way, found out before anything starts.

Runs on: driver.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dbx_tf.cluster import SlotLayout, without_password
from dbx_tf.driver import spark_layout
from dbx_tf.driver.launch import InProcessLauncher, Launcher, LocalLauncher, local_places
from dbx_tf.driver.payload import pack
from dbx_tf.driver.settings import Settings
from dbx_tf.errors import ArgumentProblem, ConfigError, Problem, raise_problems
from dbx_tf.worker.environment import package_versions

_MIN_KERAS: Final = (3, 10)
_PASSED_ON: Final = ("TF_", "KERAS_", "NCCL_")
_KEPT_BACK: Final = ("TF_CONFIG", "TF_GRPC_REUSE_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What would run where, and what is wrong with it."""

    launcher: str
    """How workers would be started: `MirroredStrategyRunner`, `mapInArrow on Spark Connect`, `local`, `in process`."""
    num_slots: int
    num_workers: int
    gpus_per_worker: int
    """GPUs of each worker (count); 0 for CPU training."""
    slots_available: int | None
    """Tasks this cluster can run at once (count); None where nothing limits them."""
    num_hosts: int | None
    """Hosts that could take part (count); None where the session does not tell."""
    num_hosts_required: int
    """Hosts that the workers have to be on (count), `require_hosts`."""
    tracking_uri: str | None
    versions: Mapping[str, str]
    """Versions on the driver."""
    problems: tuple[Problem, ...]
    """Errors before warnings."""
    _payload: bytes = field(default=b"", repr=False)
    _start: Callable[[], Launcher] | None = field(default=None, repr=False)
    _env: Mapping[str, str] = field(default_factory=dict, repr=False)

    def check(self) -> None:
        """Refuse to run if there are errors.

        Raises:
            ConfigError: If an argument is wrong.
            ClusterError: If the cluster or session can't run it.
        """
        raise_problems(self.problems)

    def make_launcher(self) -> Launcher:
        """The launcher for a run of this plan, which must have passed `check`."""
        assert self._start is not None
        return self._start()

    def __str__(self) -> str:
        device = (
            f"{self.gpus_per_worker} GPU{'s' if self.gpus_per_worker > 1 else ''} each"
            if self.gpus_per_worker
            else "CPU"
        )
        free = "" if self.slots_available is None else f" ({self.slots_available} available)"
        rows = [
            ("launcher", self.launcher),
            ("slots", f"{self.num_slots}{free}"),
            ("workers", f"{self.num_workers}, {device}"),
            ("tracking", without_password(self.tracking_uri or "off")),
            ("versions", ", ".join(f"{name} {version}" for name, version in self.versions.items())),
        ]
        lines = [f"{name:<10}{value}" for name, value in rows]
        lines += [f"{problem.level.upper()}: {problem}" for problem in self.problems]
        return "\n".join(lines if self.problems else [*lines, "no problems found"])


def make_plan(settings: Settings, train_fn: Callable[..., Any] | None, kwargs: Mapping[str, Any]) -> RunPlan:
    """Check everything and collect the problems; nothing is started but, where there is none yet, a Spark session."""
    problems = list(settings.problems())
    place = _Place(SlotLayout(num_tasks=1, gpus_per_task=0))
    payload = b""
    if train_fn is not None:
        payload, found = pack(train_fn, kwargs)
        problems += found
    if not problems:  # with an argument that is wrong, no Spark session is started to find out more
        try:
            place = _lay_out(settings, problems)
        except ConfigError as error:
            problems += error.problems
    layout, start = place.slots, place.start
    problems += check_hosts(settings.require_hosts, layout.num_tasks, place.num_hosts)
    versions, env = package_versions(), passed_on(settings.env)
    problems += check_versions(versions, layout.num_tasks, env)
    return RunPlan(
        launcher=_launcher_name(settings, start),
        num_slots=settings.num_slots,
        num_workers=layout.num_tasks,
        gpus_per_worker=layout.gpus_per_task,
        slots_available=place.available,
        num_hosts=place.num_hosts,
        num_hosts_required=(place.num_hosts or 1) if settings.require_hosts == "all" else settings.require_hosts or 1,
        tracking_uri=settings.tracking.resolved_uri() if settings.tracking.enabled else None,
        versions=versions,
        problems=tuple(sorted(problems, key=lambda problem: problem.level != "error")),
        _payload=payload,
        _start=start,
        _env=env,
    )


def _launcher_name(settings: Settings, start: Callable[[], Launcher] | None) -> str:
    if start is not None:
        return start().name
    return InProcessLauncher.name if settings.in_process else LocalLauncher.name if settings.local_mode else "Spark"


def passed_on(env: Mapping[str, str]) -> dict[str, str]:
    """The driver's settings for TensorFlow, Keras and NCCL, and what the caller adds."""
    own = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON) and name not in _KEPT_BACK}
    return {**own, **env}


def is_legacy_keras(env: Mapping[str, str]) -> bool:
    """True if training processes with this environment use tf_keras as tf.keras."""
    return env.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")


def check_versions(versions: Mapping[str, str], num_workers: int, env: Mapping[str, str]) -> Iterator[Problem]:
    """What these package versions can't do with so many workers and this environment of the training processes."""
    if "tensorflow" not in versions and "tensorflow-cpu" not in versions:
        yield Problem(
            "error", "TensorFlow is not installed", "2.19 or newer", "%pip install tensorflow keras, or dbx-tf[tf]"
        )
    elif is_legacy_keras(env):
        if "tf-keras" not in versions:
            what = "TF_USE_LEGACY_KERAS is set, but tf_keras is not installed"
            tf_series = ".".join(versions.get("tensorflow", versions.get("tensorflow-cpu", "")).split(".")[:2])
            yield Problem(
                "error", what, "tf_keras of TensorFlow's own version", f"%pip install 'tf-keras=={tf_series}.*'"
            )
        return
    keras = versions.get("keras")
    if num_workers > 1 and keras and tuple(int(part) for part in keras.split(".")[:2]) < _MIN_KERAS:
        yield Problem(
            "error",
            f"Keras {keras} trains wrong on more than one worker (metrics before 3.10, gradients before 3.8)",
            "Keras 3.10 or newer, or tf_keras with TF_USE_LEGACY_KERAS=1",
            "%pip install 'keras>=3.10', then restart Python",
        )


def check_hosts(required: int | str | None, num_workers: int, num_hosts: int | None) -> Iterator[Problem]:
    """Whether so many workers can be on the required hosts, of which so many are there (None: not known)."""
    if required == "all" and num_hosts is None:
        what = 'require_hosts="all", but this Spark session does not tell how many hosts it has'
        yield ArgumentProblem("error", what, "a number", "give the number of servers")
        return
    needed = num_hosts if required == "all" else required
    if not isinstance(needed, int):
        return
    if num_hosts is not None and needed > num_hosts:
        what, possible = f"require_hosts={required}", f"the cluster has {num_hosts} host{'s' * (num_hosts > 1)}"
        yield Problem("error", what, possible, "wait until all servers have started, or lower require_hosts")
    elif needed > num_workers:
        what = f"require_hosts={required} needs workers on {needed} hosts, but there are {num_workers} workers"
        yield Problem("error", what, "each host needs a worker", "raise num_slots")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a run would be."""

    slots: SlotLayout
    available: int | None = None
    num_hosts: int | None = None
    start: Callable[[], Launcher] | None = None


def _lay_out(settings: Settings, problems: list[Problem]) -> _Place:
    if settings.in_process:
        return _Place(SlotLayout(1, 0), num_hosts=1, start=InProcessLauncher)
    if settings.local_mode:
        gpus = local_gpus() if settings.use_gpu is not False else ()
        if settings.use_gpu and len(gpus) < settings.num_slots:
            what = f"num_slots={settings.num_slots} with use_gpu=True, but the driver's machine has {len(gpus)} GPUs"
            fix = "lower num_slots, or train on the cluster with local_mode=False, or on CPUs with use_gpu=False"
            problems.append(Problem("error", what, "local mode uses one GPU for each slot", fix))
        use_gpu = len(gpus) >= settings.num_slots
        mine = gpus[: settings.num_slots] if use_gpu else ()
        layout = SlotLayout(settings.num_slots, 1 if use_gpu else 0)
        places = local_places(settings.num_slots, mine)
        return _Place(layout, num_hosts=1, start=lambda: LocalLauncher(places))
    spark = spark_layout.lay_out(settings.num_slots, settings.use_gpu, settings.gpu_resource_name, problems)
    launcher = spark.launcher
    return _Place(spark.slots, spark.available, spark.num_hosts, (lambda: launcher) if launcher else None)


def local_gpus() -> tuple[str, ...]:
    """The GPUs of this machine that may be used, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(gpu for gpu in visible.split(",") if gpu and gpu != "-1")
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()
