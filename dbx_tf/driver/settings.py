"""What a caller can set on a Runner.

Runs on: driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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
    """With one slot: train in the calling process, so that a debugger stops in train_fn."""

    def problems(self) -> Iterator[Problem]:
        """What is wrong with these values, found without asking anybody."""
        slots = self.num_slots
        if not isinstance(slots, int) or isinstance(slots, bool) or slots <= 0:
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
        yield from self.tracking.problems()
