"""Training on several workers equals one process, or is refused, or is told: the table, case by case.

`make conformance` runs this and writes docs/conformance.md.
"""

import importlib.metadata
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbx_tf import Runner, Tracking, WorkerFailedError

from .cases import CASES, Case, run_cases
from .cases.runs import FIXED, run_cases_without_fixes
from .cases.table import TOLERANCE

HERE = Path(__file__).parent
WRITE_TABLE = "DBX_TF_CONFORMANCE_TABLE"


def version(package: str) -> str:
    """The installed version of a package."""
    return importlib.metadata.version(package)


IS_NEWEST = tuple(int(part) for part in version("keras").split(".")[:2]) >= (3, 15)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # one fixture runs all cases of a stack


@dataclass(frozen=True)
class Stack:
    """One table: a Keras and a number of workers."""

    keras_name: str
    num_workers: int
    cases: dict[str, Case]

    def expected(self, case: Case) -> str:
        """What is expected of a case on this stack."""
        return case.legacy or case.expected if self.keras_name == "tf_keras" else case.expected


STACKS = {
    "keras": Stack("keras", 2, CASES),
    "keras-3": Stack("keras", 3, {name: case for name, case in CASES.items() if case.three}),
    "tf_keras": Stack("tf_keras", 2, {name: case for name, case in CASES.items() if case.legacy != "absent"}),
}
CORE = {name for name, case in CASES.items() if name in FIXED or case.three or case.expected != "equal"}
TABLE = [
    pytest.param(stack, name, marks=[] if stack == "keras" and name in CORE else [pytest.mark.table])
    for stack, entry in STACKS.items()
    for name in entry.cases
]


def differences(one: Any, other: Any) -> float:
    """The largest absolute difference between two results of the same structure."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((differences(one[name], other[name]) for name in one), default=0.0)
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        return max((differences(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    one, other = np.asarray(one, float), np.asarray(other, float)
    assert one.shape == other.shape
    assert (np.isnan(one) == np.isnan(other)).all()
    return float(np.nan_to_num(np.abs(one - other)).max()) if one.size else 0.0


def is_equal(one: Any, other: Any) -> bool:
    """True for two results of the same structure and about the same numbers."""
    try:
        return differences(one, other) < 10 * TOLERANCE
    except AssertionError:
        return False


@dataclass
class Outcomes:
    """What the cases of a stack gave alone and on the workers."""

    stack: Stack
    alone: Path
    together: Path
    notices: tuple[str, ...]
    rows: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> list[Any]:
        """A case's outcomes: of one process, and of each worker."""
        workers = [self.together / f"{name}.{index}.pkl" for index in range(self.stack.num_workers)]
        return [pickle.loads(path.read_bytes()) for path in (self.alone / f"{name}.0.pkl", *workers)]


def run_alone(folder: Path, keras_name: str, names: list[str]) -> None:
    """Run cases in a plain process, without dbx_tf's runner."""
    arguments = (str(folder), names, keras_name)
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import cases; cases.run_cases(*{arguments!r})"
    legacy = {"TF_USE_LEGACY_KERAS": "1"} if keras_name == "tf_keras" else {}
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", **legacy}
    subprocess.run([sys.executable, "-c", code], env=env, timeout=1200, check=True)


@pytest.fixture(scope="session")
def outcomes_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Outcomes]]:
    """Run the chosen cases of a stack when they are asked for first: once alone, once on workers."""
    made: dict[str, Outcomes] = {}
    failed: dict[str, BaseException] = {}
    tests = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]

    def outcomes(name: str) -> Outcomes:
        if name in failed:
            raise failed[name]
        if name not in made:
            try:
                made[name] = run(name)
            except BaseException as error:  # pytest's own for a timeout is no Exception
                failed[name] = error  # it takes minutes, and would take them for each case
                raise
        return made[name]

    def run(name: str) -> Outcomes:
        stack = STACKS[name]
        chosen = {test["name"] for test in tests if test.get("stack") == name}
        names = [case for case in stack.cases if case in chosen]
        alone, together = (tmp_path_factory.mktemp(folder) for folder in ("alone", "together"))
        run_alone(alone, stack.keras_name, names)
        env = {"TF_USE_LEGACY_KERAS": "1"} if stack.keras_name == "tf_keras" else {}
        runner = Runner(num_slots=stack.num_workers, local_mode=True, tracking=Tracking(enabled=False), env=env)
        result = runner.run(run_cases, folder=str(together), names=names, keras_name=stack.keras_name)
        return Outcomes(stack, alone, together, tuple(result.notices))

    yield outcomes
    if table := os.environ.get(WRITE_TABLE):
        Path(table).write_text(as_table(made))


@pytest.mark.parametrize(("stack", "name"), TABLE)
def test_case(outcomes_of: Callable[[str], Outcomes], stack: str, name: str) -> None:
    """The case is equal, told or refused, as the table says."""
    outcomes, case = outcomes_of(stack), CASES[name]
    alone, *workers = outcomes.of(name)
    expected = outcomes.stack.expected(case)
    if "error" in alone and not IS_NEWEST:
        assert all("error" in worker for worker in workers)
        outcomes.rows[name] = f"absent | this version can't do it on one machine either: {alone['error']}"
        return
    assert "error" not in alone, alone
    if expected == "refused":
        for outcome in workers:
            assert outcome.get("error", "no error").startswith("ConfigError: ")
            assert case.text in outcome["error"]
        outcomes.rows[name] = f"refused | {workers[0]['error'].removeprefix('ConfigError: ')}"
        return
    for worker in workers:
        assert "error" not in worker, worker
        assert differences(workers[0], worker) == 0.0, "the workers differ from each other"
    notices = [notice for notice in outcomes.notices if (case.notice or case.text) in notice]
    if case.notice or expected == "told":
        assert notices, outcomes.notices
    if expected == "told":
        outcomes.rows[name] = f"told | {notices[0]}"
        return
    difference = differences(alone, workers[0])
    assert difference <= case.tolerance
    outcomes.rows[name] = f"equal | {difference:.0e}{' and told: ' + notices[0] if case.notice else ''}"


@pytest.fixture(scope="session")
def unfixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outcomes of the cases that need a fix, without it."""
    folder = tmp_path_factory.mktemp("unfixed")
    runner = Runner(num_slots=2, local_mode=True, tracking=Tracking(enabled=False))
    for _ in range(3):
        names = [name for name in FIXED if len(list(folder.glob(f"{name}.?.pkl"))) < 2]
        try:
            runner.run(run_cases_without_fixes, folder=str(folder), names=names)
            break
        except WorkerFailedError as error:  # Keras's own loop is seldom killed when it drops an iterator
            if error.cause_type != "ProcessKilled":
                raise
    return folder


@pytest.mark.parametrize(("stack", "name"), [("keras", name) for name in FIXED])
def test_a_fix_is_still_needed(outcomes_of: Callable[[str], Outcomes], unfixed: Path, stack: str, name: str) -> None:
    """Without dbx_tf's fix the case is wrong: when this fails, Keras has mended it and the fix can go."""
    alone, *_ = outcomes_of(stack).of(name)
    chief, other = (pickle.loads((unfixed / f"{name}.{index}.pkl").read_bytes()) for index in (0, 1))
    assert not (is_equal(alone, chief) and is_equal(chief, other))


def as_table(tables: dict[str, Outcomes]) -> str:
    """The cases that held, as Markdown."""
    text = (
        "# Conformance\n\nWritten by `make conformance`: training on several workers against one process with the same "
        "global batch, seed and data. For equal cases, the largest difference in weights, history, evaluation and "
        "prediction.\n"
    )
    for outcomes in tables.values():
        rows = outcomes.rows
        kinds = ("equal", "told", "refused", "absent")
        counts = {kind: sum(row.startswith(kind) for row in rows.values()) for kind in kinds}
        counts["different"] = len(outcomes.stack.cases) - len(rows)
        summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        body = "".join(f"| {name.replace('_', ' ')} | {row} |\n" for name, row in rows.items())
        title = (
            f"{outcomes.stack.keras_name} {version(outcomes.stack.keras_name)} on {outcomes.stack.num_workers} workers"
        )
        text += f"\n## {title}\n\n{summary}\n\n| case | outcome | |\n|---|---|---|\n{body}"
    return text
