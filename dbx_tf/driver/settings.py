"""What a caller can set on a Runner.

Runs on: driver.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dbx_tf.driver.tracking import Tracking
from dbx_tf.errors import ArgumentProblem, Problem


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The fields of a Runner; a superset of MirroredStrategyRunner's arguments."""

    num_slots: int
    """GPUs, or without GPUs Spark tasks, that train together (count, from 1)."""
    local_mode: bool = False
    """Train with `num_slots` processes on the driver's machine instead of on the cluster; needs no Spark."""
    use_gpu: bool | None = None
    """True: GPUs, or an error; False: CPUs; None: GPUs if this cluster schedules them."""
    gpu_resource_name: str = "gpu"
    """Spark's name of the GPU resource, as in `spark.task.resource.gpu.amount`."""
    use_custom_strategy: bool = False
    """Accepted for MirroredStrategyRunner's sake: train_fn may build a strategy or not, both train on all workers."""
    tracking: Tracking = field(default_factory=Tracking)
    """Where the run is logged."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Added to the environment of the training processes (the driver's TF_*, KERAS_* and NCCL_* are passed on)."""
    in_process: bool = False
    """With one slot: train in the calling process, so that a debugger stops in train_fn; without any deadline."""
    require_hosts: int | Literal["all"] | None = None
    """Start training only if the workers are on so many hosts (count), or on all that the cluster has."""
    start_timeout_seconds: float = 600.0
    """All workers have to be ready so long after the start; importing TensorFlow takes minutes on a cold server."""
    stall_timeout_seconds: float = 1800.0
    """The run ends when no worker has finished a step for so long, or used its processor outside of Keras's fit."""
    timeout_seconds: float | None = None
    """The run ends after so long, done or not; None: it may take any time."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong with these values, found without asking anybody."""
        slots = self.num_slots
        if not _is_count(slots):
            yield ArgumentProblem(
                "error",
                f"num_slots={slots!r}",
                "a whole number from 1: the GPUs, or without GPUs the Spark tasks, that train together",
                "give the number of servers to begin with",
            )
        elif self.in_process and slots != 1:
            yield ArgumentProblem(
                "error", f"in_process=True with num_slots={slots}", "one process is only one worker", "use num_slots=1"
            )
        wrong = [name for name, value in self.env.items() if not isinstance(value, str)]
        if wrong:
            yield ArgumentProblem(
                "error", f"env has values that are no text ({', '.join(wrong)})", "variables are text", "use str()"
            )
        if self.require_hosts not in (None, "all") and not _is_count(self.require_hosts):
            yield ArgumentProblem(
                "error",
                f"require_hosts={self.require_hosts!r}",
                'a number of hosts from 1, or "all"',
                "give one of them",
            )
        elif _is_count(slots) and _is_count(self.require_hosts) and int(self.require_hosts or 0) > slots:
            what = f"require_hosts={self.require_hosts} with num_slots={slots}"
            yield ArgumentProblem("error", what, "each host needs a slot", "raise num_slots or lower require_hosts")
        for name in ("start_timeout_seconds", "stall_timeout_seconds", "timeout_seconds"):
            value = getattr(self, name)
            if (value is None and name == "timeout_seconds") or (_is_number(value) and 0 < value < math.inf):
                continue
            yield ArgumentProblem("error", f"{name}={value!r}", "a number of seconds, more than 0", "give one")
        yield from self.tracking.problems()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
