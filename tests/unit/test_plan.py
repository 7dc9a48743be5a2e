"""The plan's checks that need no Spark: each fires where it should and is silent elsewhere."""

import re
from pathlib import Path
from typing import Any

import pytest

from dbx_tf import ConfigError, DbxTfError, Runner, Tracking
from dbx_tf.driver.checks import check_hosts, check_versions
from dbx_tf.driver.place import local_gpus
from dbx_tf.driver.plan import passed_on
from dbx_tf.errors import Problem

OFF = Tracking(enabled=False)
GOOD = {"python": "3.12.3", "tensorflow": "2.21.0", "keras": "3.15.1"}


def runner(**changes: Any) -> Runner:
    return Runner(**{"num_slots": 2, "local_mode": True, "use_gpu": False, "tracking": OFF, **changes})


def needs_epochs(epochs: int) -> None:
    """A train_fn that trains nothing."""


def test_a_plan_says_what_would_run() -> None:
    """A good plan names launcher, workers, tracking and versions, and finds nothing wrong."""
    plan = runner().plan(lambda: None)
    text = str(plan)
    assert (plan.launcher, plan.num_workers, plan.gpus_per_worker, plan.problems) == ("local", 2, 0, ())
    assert "2, CPU" in text
    assert "no problems found" in text
    assert "tensorflow" in text
    plan.check()


@pytest.mark.parametrize("num_slots", [0, -1, 1.5, "2", None, True])
def test_num_slots_has_to_be_a_count(num_slots: Any) -> None:
    """What is no count from 1 is refused, whatever it is."""
    with pytest.raises(ConfigError, match="num_slots="):
        runner(num_slots=num_slots).run(lambda: None)


def test_in_process_is_one_worker() -> None:
    """A debugger's run can't have two workers."""
    with pytest.raises(ConfigError, match="in_process=True with num_slots=2"):
        runner(in_process=True).run(lambda: None)


def test_env_values_are_text() -> None:
    """A number as environment variable is refused before it breaks a process."""
    with pytest.raises(ConfigError, match="TF_SEED"):
        runner(env={"TF_SEED": 1}).run(lambda: None)


def test_all_problems_are_told_at_once() -> None:
    """Wrong arguments and wrong settings come in one error."""
    with pytest.raises(ConfigError) as caught:
        runner(env={"A": 1}, in_process=True).run(needs_epochs)  # type: ignore[call-arg]  # the mistake
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("registry", "name", "text"),
    [
        ("databricks-uc", "digits", "Unity Catalog takes catalog.schema.model"),
        ("databricks-uc", "main.ml.digits", ""),
        ("databricks", "digits", "there, models have no aliases"),
    ],
)
def test_a_name_has_to_fit_its_registry(registry: str, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unity Catalog's names have three levels, and the registry before it has no aliases."""
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", registry)
    tracking = Tracking(tracking_uri="databricks", registered_model_name=name, model_alias="champion")
    assert "".join(problem.possible for problem in tracking.problems()).startswith(text)
    assert bool(tracking.problems()) == bool(text)


def test_positional_arguments_are_refused() -> None:
    """run() takes train_fn's arguments by name, as MirroredStrategyRunner does."""
    with pytest.raises(TypeError, match="by name"):
        runner().run(needs_epochs, 5)


def problems(versions: dict[str, str], num_workers: int = 2, env: dict[str, str] | None = None) -> list[Problem]:
    return list(check_versions(versions, num_workers, env or {}))


@pytest.mark.parametrize("keras", ["3.9.2", "3.5.0", "2.15.0"])
def test_keras_that_trains_wrong_is_refused_on_several_workers(keras: str) -> None:
    """Keras before 3.10 is refused with the pip line that helps; one worker may use it."""
    (problem,) = problems({**GOOD, "keras": keras})
    assert keras in problem.what
    assert "%pip install 'keras>=3.10'" in problem.fix
    assert problems({**GOOD, "keras": keras}, num_workers=1) == []


@pytest.mark.parametrize("keras", ["3.10.0", "3.15.1", "4.0.0"])
def test_keras_that_trains_right_is_taken(keras: str) -> None:
    """Keras from 3.10 on is fine."""
    assert problems({**GOOD, "keras": keras}) == []


def test_legacy_keras_needs_its_package() -> None:
    """TF_USE_LEGACY_KERAS without tf_keras is refused, with it the version of Keras does not matter."""
    legacy = {"TF_USE_LEGACY_KERAS": "1"}
    (problem,) = problems(GOOD, env=legacy)
    assert "tf-keras==2.21.*" in problem.fix
    assert problems({**GOOD, "keras": "3.5.0", "tf-keras": "2.21.0"}, env=legacy) == []


def test_tensorflow_has_to_be_there() -> None:
    """Without TensorFlow nothing trains; the CPU package counts as TensorFlow."""
    (problem,) = problems({"python": "3.12"})
    assert "TensorFlow is not installed" in problem.what
    assert problems({"python": "3.12", "tensorflow-cpu": "2.21.0", "keras": "3.15"}) == []


def test_settings_for_tensorflow_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's TF_*, KERAS_* and NCCL_* reach the workers, TF_CONFIG does not, and the caller's word is last."""
    for name in ("TF_CONFIG", "TF_X", "KERAS_X", "NCCL_X", "OTHER_X"):
        monkeypatch.setenv(name, "driver")
    env = passed_on({"TF_X": "caller"})
    assert {name: env.get(name) for name in ("TF_CONFIG", "TF_X", "KERAS_X", "NCCL_X", "OTHER_X")} == {
        "TF_CONFIG": None,
        "TF_X": "caller",
        "KERAS_X": "driver",
        "NCCL_X": "driver",
        "OTHER_X": None,
    }


def fake_nvidia_smi(folder: Path, gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the driver's tool on a machine with so many GPUs."""
    script = folder / "nvidia-smi"
    script.write_text("#!/bin/sh\n" + "".join(f"echo {index}\n" for index in range(gpus)))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_local_mode_uses_the_gpus_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU for each slot where there are enough, else CPUs, unless GPUs were asked for."""
    fake_nvidia_smi(tmp_path, 2, monkeypatch)
    assert local_gpus() == ("0", "1")
    assert runner(use_gpu=None).plan().gpus_per_worker == 1
    assert runner(use_gpu=None, num_slots=3).plan().gpus_per_worker == 0
    assert runner(use_gpu=False).plan().gpus_per_worker == 0
    (problem,) = runner(use_gpu=True, num_slots=3).plan().problems
    assert "num_slots=3 with use_gpu=True, but the driver's machine has 2 GPUs" in problem.what


def test_local_mode_respects_visible_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that the driver may not see are not given to workers."""
    fake_nvidia_smi(tmp_path, 4, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert local_gpus() == ("3", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert local_gpus() == ()


def test_no_secret_is_shown() -> None:
    """Neither the plan nor the runner's repr shows a password in an address, or what env holds."""
    settings = Tracking(tracking_uri="http://me:hunter2@127.0.0.1:5000")
    shown = runner(tracking=settings, env={"KEY": "hunter2"})
    assert "hunter2" not in repr(shown)
    assert "hunter2" not in str(shown.plan())
    assert "127.0.0.1:5000" in str(shown.plan())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"require_hosts": 0}, "require_hosts=0"),
        ({"require_hosts": "both"}, "require_hosts='both'"),
        ({"require_hosts": True}, "require_hosts=True"),
        ({"require_hosts": 3}, "require_hosts=3 with num_slots=2"),
        ({"require_hosts": 2}, "the cluster has 1 host"),
        ({"start_timeout_seconds": 0}, "start_timeout_seconds=0"),
        ({"start_timeout_seconds": None}, "start_timeout_seconds=None"),
        ({"stall_timeout_seconds": float("inf")}, "stall_timeout_seconds=inf"),
        ({"timeout_seconds": "1h"}, "timeout_seconds='1h'"),
    ],
)
def test_limits_are_checked(changes: dict[str, Any], text: str) -> None:
    """Hosts are counted, and every wait but that for the end has an end."""
    with pytest.raises(DbxTfError, match=re.escape(text)):
        runner(**changes).run(lambda: None)


@pytest.mark.parametrize("changes", [{"require_hosts": "all"}, {"require_hosts": 1}, {"timeout_seconds": 1.5}])
def test_limits_that_can_be_kept_are_taken(changes: dict[str, Any]) -> None:
    """On one host, all hosts are one."""
    assert runner(**changes).plan(lambda: None).problems == ()


def test_hosts_that_are_not_known_can_be_counted_but_not_all_required() -> None:
    """Where the session does not tell its hosts, a number is checked when the workers are there."""
    assert list(check_hosts(2, 2, None)) == []
    (problem,) = check_hosts("all", 2, None)
    assert "does not tell how many hosts" in problem.what
    (problem,) = check_hosts("all", 2, 3)
    assert "needs workers on 3 hosts, but there are 2 workers" in problem.what
