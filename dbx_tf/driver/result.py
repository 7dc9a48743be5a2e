"""What a run returns, readable in a terminal and in a notebook.

Runs on: driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Generic, TypeVar

from dbx_tf.cluster import Topology
from dbx_tf.errors import DbxTfError

R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunResult(Generic[R]):
    """A finished training."""

    run_id: str | None
    """The MLflow run; None if tracking is off."""
    model_uri: str | None
    """The logged model, `models:/m-...`; None if there is none."""
    history: Mapping[str, Sequence[float]]
    """Metric values per epoch, by name, over all fits of the run."""
    topology: Topology
    """Which host, process and device took part."""
    seconds: float
    """From the call of run() to its end (seconds)."""
    num_restarts: int = 0
    """How often the workers were started again (count)."""
    notices: tuple[str, ...] = ()
    """Plain sentences worth reading."""
    _value: R | None = field(default=None)
    _value_error: str = ""

    @property
    def value(self) -> R:
        """What train_fn returned on the chief.

        Raises:
            DbxTfError: If it could not be brought to the driver; the model and the metrics are not affected.
        """
        if self._value_error:
            raise DbxTfError(
                f"train_fn returned {self._value_error}; the run itself is complete (run_id={self.run_id}, "
                f"model_uri={self.model_uri}); return numbers, arrays or a Keras model to get them here"
            )
        return self._value  # type: ignore[return-value]  # None is a value of R when train_fn returns None

    def _rows(self) -> list[tuple[str, str]]:
        rows = [("topology", str(self.topology))]
        rows += [
            (f"  worker {w.worker_index}", f"{w.host} ({w.address}), pid {w.pid}, {', '.join(map(_short, w.devices))}")
            for w in self.topology.workers
        ]
        last = {name: values[-1] for name, values in self.history.items() if values}
        epochs = len(self.history.get("epoch_seconds", ()))
        if last:
            rows.append((f"epoch {epochs}", ", ".join(f"{name}={value:.4g}" for name, value in last.items())))
        value = f"not available: {self._value_error}" if self._value_error else repr(self._value)
        rows.append(("value", _shorten(value)))
        rows += [("run_id", str(self.run_id)), ("model_uri", str(self.model_uri)), ("seconds", f"{self.seconds:.1f}")]
        rows += [("notice", notice) for notice in self.notices]
        return rows

    def __repr__(self) -> str:
        return "RunResult\n" + "\n".join(f"  {name:<12} {value}" for name, value in self._rows())

    def _repr_html_(self) -> str:
        cells = "".join(
            f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(value)}</td></tr>'
            for name, value in self._rows()
        )
        return f"<table><caption>{escape(str(self.topology))}</caption>{cells}</table>"


def _short(device: str) -> str:
    return device.rpartition("device:")[2] or device


def _shorten(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
