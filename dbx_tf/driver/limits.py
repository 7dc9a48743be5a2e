"""How long a run may take to start, to make a step and to end, and on how many hosts it has to be.

Runs on: driver; worker 0 where it leads the run.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What ends a run that does not go on; see the fields of the same names in `Settings`."""

    start_timeout_seconds: float = 600.0
    stall_timeout_seconds: float = 1800.0
    timeout_seconds: float | None = None
    num_hosts: int = 1
    """Hosts that the workers have to be on (count)."""
