"""The command line and the configuration file of a job: what they make, and how they refuse."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from dbx_tf import ConfigError, Runner, Tracking, cli, job
from dbx_tf.cluster import Topology
from dbx_tf.driver.result import RunResult


@pytest.fixture(autouse=True)
def _path_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_says_what_a_runner_takes(tmp_path: Path) -> None:
    text = """
        train_fn: my.module:train
        runner: {num_slots: 4, env: {TF_NUM_INTRAOP_THREADS: "2"}}
        tracking: {experiment: /Shared/digits, tags: {team: vision}}
        params: {epochs: 3}
    """
    made = job.load_job(write(tmp_path / "job.yml", text))
    assert made.train_fn == "my.module:train"
    assert made.params == {"epochs": 3}
    tracking = Tracking(experiment="/Shared/digits", tags={"team": "vision"})
    assert made.make_runner() == Runner(num_slots=4, env={"TF_NUM_INTRAOP_THREADS": "2"}, tracking=tracking)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds nothing"),
        ("- a", "holds a list"),
        ("a: [", "is not YAML"),
        ("runer: {num_slots: 2}", "has runer; possible are train_fn, runner, tracking, params"),
        ("runner: {num_slots: two}", "runner has num_slots='two'; Input should be a valid integer"),
        ("runner: {num_slots: 2, slots: 2}", "runner has slots; possible are num_slots, local_mode"),
        ("runner: {local_mode: true}", "runner lacks num_slots"),
        ("tracking: {experiment: 1}", "tracking has experiment=1; Input should be a valid string"),
        ("runner: {num_slots: 2, tracking: {}}", "runner has tracking; it is a section of its own"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        job.load_job(write(tmp_path / "job.yml", text)).make_runner()
    assert message in str(error.value)
    assert error.value.problems


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        job.load_job(tmp_path / "nothing.yml")


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        job.load_job(write(tmp_path / "job.yml", "runner: {num_slots: x, a: 1, b: 2}")).make_runner()
    assert len(error.value.problems) == 3


def test_a_function_of_a_file_finds_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "neighbour_of_train.py", "answer = 42")
    write(tmp_path / "train_file.py", "import neighbour_of_train\ndef train(): return neighbour_of_train.answer")
    assert job.find_train_fn(f"{tmp_path}/train_file.py:train")() == 42


def test_a_function_of_a_module_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_package").mkdir()
    write(tmp_path / "my_package" / "training.py", "def train(): return 1")
    assert job.find_train_fn("my_package.training:train")() == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train", "package.module:function or path/to/file.py:function"),
        ("no.such.module:train", "there is no module no.such.module"),
        ("no/such/file.py:train", "there is no file"),
        ("dbx_tf.demo:train", "dbx_tf.demo has no function train; it has load_digits"),
    ],
)
def test_a_function_that_is_not_there(target: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        job.find_train_fn(target)
    assert message in str(error.value)


def test_a_module_that_lacks_what_it_imports_says_so(tmp_path: Path) -> None:
    write(tmp_path / "needs_more.py", "import nothing_of_that_name")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        job.find_train_fn(f"{tmp_path}/needs_more.py:train")


def train(  # type: ignore[no-untyped-def]  # as users write it
    epochs: int = 5,
    rate=0.1,
    name: str = "a",
    layers: list[int] | None = None,
    shuffle=True,
    data: Any = None,
) -> None:
    """A train_fn, typed by annotations and by defaults."""


def test_parameters_get_the_types_of_the_signature() -> None:
    texts = {"epochs": "3", "rate": "1", "name": "7", "layers": "[1, 2]", "shuffle": "false", "data": "a"}
    values = job.typed_params(train, texts)
    assert values == {"epochs": 3, "rate": 1.0, "name": "7", "layers": [1, 2], "shuffle": False, "data": "a"}
    assert isinstance(values["rate"], float)


def test_parameters_of_a_wrong_type_are_refused_together() -> None:
    with pytest.raises(ConfigError) as error:
        job.typed_params(train, {"epochs": "many", "shuffle": "perhaps"})
    assert "--param epochs=many; train_fn takes epochs as int" in str(error.value)
    assert len(error.value.problems) == 2


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of the command."""
    monkeypatch.setattr(sys, "argv", ["dbx-tf", *arguments])
    try:
        cli.main()
    except SystemExit as error:
        return int(error.code or 0)
    return 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("run",),
        ("run", "a:b", "--no-such-option"),
        ("run", "dbx_tf.demo:train_fn", "--param", "epochs"),
        ("run", "dbx_tf.demo:no_train_fn", "--num-slots", "2"),
        ("run", "dbx_tf.demo:train_fn"),
        ("run", "dbx_tf.demo:train_fn", "--num-slots", "0", "--local-mode"),
        ("plan", "dbx_tf.demo:train_fn", "--num-slots", "2", "--local-mode", "--param", "steps=2"),
    ],
)
def test_a_bad_set_up_exits_with_2(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    assert run_cli(monkeypatch, *arguments) == 2


def test_options_go_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "train_fn: dbx_tf.demo:train_fn\nrunner: {num_slots: 2, local_mode: true}\nparams: {epochs: 1}"
    path = write(tmp_path / "job.yml", text)
    uri = f"sqlite:///{tmp_path}/own.db"
    assert run_cli(monkeypatch, "plan", "--config", str(path), "--num-slots", "3", "--tracking-uri", uri) == 0
    printed = capsys.readouterr().out
    assert "slots     3" in printed
    assert uri in printed


class TaskValues:
    """A double of dbutils.jobs.taskValues."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value


def make_result(history: dict[str, list[float]]) -> RunResult[None]:
    return RunResult(
        run_id="abc",
        model_uri="models:/m-1",
        history=history,
        topology=Topology(workers=(), num_replicas=0),
        seconds=1.0,
    )


def test_a_databricks_job_gets_task_values(monkeypatch: pytest.MonkeyPatch) -> None:
    task_values = TaskValues()
    dbutils = types.SimpleNamespace(jobs=types.SimpleNamespace(taskValues=task_values))
    assert job.publish(make_result({"loss": [2.0, 1.0]})) is None
    assert not task_values.values  # not on Databricks
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    monkeypatch.setitem(sys.modules, "databricks.sdk.runtime", types.SimpleNamespace(dbutils=dbutils))
    assert job.publish(make_result({"loss": [2.0, 1.0], "none": []})) is None
    assert task_values.values == {"run_id": "abc", "model_uri": "models:/m-1", "metrics": {"loss": 1.0}}
    reason = job.publish(make_result({"a" * 50_000: [1.0]}))
    assert reason is not None
    assert "larger than" in reason


def test_task_values_that_can_not_be_set_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "17.3")
    monkeypatch.setitem(sys.modules, "databricks.sdk.runtime", types.SimpleNamespace())
    reason = job.publish(make_result({}))
    assert reason is not None
    assert reason.startswith("the task values could not be set")
