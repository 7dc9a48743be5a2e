"""Training on several workers equals one process, or is refused, or is told: the table, case by case.

`make conformance` runs this and writes docs/conformance.md.
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbx_tf import Runner, RunResult, Tracking

from . import cases

TOLERANCE = 1e-5
HERE = Path(__file__).parent
WRITE_TABLE = "DBX_TF_CONFORMANCE_TABLE"

pytestmark = pytest.mark.slow


def differences(one: Any, other: Any) -> float:
    """The largest absolute difference between two results of the same structure."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((differences(one[name], other[name]) for name in one), default=0.0)
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        return max((differences(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    return float(np.abs(np.asarray(one, float) - np.asarray(other, float)).max())


@dataclass
class Outcomes:
    """What the cases gave alone and on the workers."""

    alone: Path
    together: Path
    run: RunResult[None]
    rows: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> list[Any]:
        """A case's outcomes: one process, worker 0, worker 1."""
        paths = (self.alone / f"{name}.0.pkl", self.together / f"{name}.0.pkl", self.together / f"{name}.1.pkl")
        return [pickle.loads(path.read_bytes()) for path in paths]


@pytest.fixture(scope="session")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Run all cases: once in a plain process without dbx_tf's runner, once in two that train together."""
    alone, together = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("together")
    names = list(cases.CASES)
    plain = f"import sys; sys.path.insert(0, {str(HERE)!r}); import cases; cases.run_cases({str(alone)!r}, {names!r})"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    subprocess.run([sys.executable, "-c", plain], env=env, timeout=500, check=True)
    runner = Runner(num_slots=2, local_mode=True, tracking=Tracking(enabled=False))
    outcomes = Outcomes(alone, together, runner.run(cases.run_cases, folder=str(together), names=names))
    yield outcomes
    if table := os.environ.get(WRITE_TABLE):
        Path(table).write_text(as_table(outcomes.rows))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", list(cases.CASES))
def test_case(outcomes: Outcomes, name: str) -> None:
    """The case is equal, told or refused, as the table says."""
    case = cases.CASES[name]
    alone, chief, other = outcomes.of(name)
    assert "error" not in alone, alone
    if case.expected == "refused":
        for outcome in (chief, other):
            assert outcome["error"].startswith("ConfigError: ")
            assert case.text in outcome["error"]
        outcomes.rows[name] = f"refused | {chief['error'].removeprefix('ConfigError: ')}"
        return
    assert "error" not in chief, chief
    assert differences(chief, other) == 0.0, "the workers differ from each other"
    difference = differences(alone, chief)
    if case.expected == "told":
        (notice,) = [notice for notice in outcomes.run.notices if case.text in notice]
        outcomes.rows[name] = f"told | {notice}"
        return
    assert difference <= TOLERANCE
    outcomes.rows[name] = f"equal | {difference:.0e}"


@pytest.fixture(scope="session")
def unfixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outcomes of the cases that need a fix, without it."""
    folder = tmp_path_factory.mktemp("unfixed")
    runner = Runner(num_slots=2, local_mode=True, tracking=Tracking(enabled=False))
    runner.run(cases.run_cases_without_fixes, folder=str(folder), names=list(cases.FIXED))
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", cases.FIXED)
def test_a_fix_is_still_needed(outcomes: Outcomes, unfixed: Path, name: str) -> None:
    """Without dbx_tf's fix the case is wrong: when this fails, Keras has mended it and the fix can go."""
    alone, _, _ = outcomes.of(name)
    chief, other = (pickle.loads((unfixed / f"{name}.{index}.pkl").read_bytes()) for index in (0, 1))
    assert max(differences(alone, chief), differences(chief, other)) > 10 * TOLERANCE


def as_table(rows: dict[str, str]) -> str:
    """The cases that held, as Markdown."""
    counts = {kind: sum(row.startswith(kind) for row in rows.values()) for kind in ("equal", "told", "refused")}
    different = len(cases.CASES) - len(rows)
    summary = ", ".join(f"{count} {kind}" for kind, count in {**counts, "different": different}.items())
    body = "".join(f"| {name.replace('_', ' ')} | {row} |\n" for name, row in rows.items())
    return (
        "# Conformance\n\nWritten by `make conformance`: training on 2 workers against one process with the same "
        "global batch, seed and data. For equal cases, the largest difference in weights, history, evaluation and "
        "prediction."
        f"\n\n{summary}\n\n| case | outcome | |\n|---|---|---|\n{body}"
    )
