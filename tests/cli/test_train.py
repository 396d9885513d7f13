"""`captionrl train` runs the recipe that it names, with the arguments as they are."""

import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hf_captionrl.cli import main, train
from hf_captionrl.cli.train import METHODS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def called(monkeypatch):
    """The recipes that would run, each with its arguments, and what accelerate would launch."""
    calls = []

    def run_recipe(recipe, arguments):
        calls.append([str(recipe), *arguments])
        sys.exit(0)

    def launch(arguments):
        calls.append(["launch", *arguments])
        return 0

    monkeypatch.setattr(train, "run_recipe", run_recipe)
    monkeypatch.setattr(train, "launch", launch)
    return calls


def test_recipe_gets_its_arguments_unchanged(called):
    assert main(["train", "smile", "--max_steps", "3", "--config", "x/y.yaml", "--help"]) == 0
    assert called == [[str(ROOT / "recipes/smile_blip.py"), "--max_steps", "3", "--config", "x/y.yaml", "--help"]]


def test_configuration_is_found_by_its_name(called, tmp_path, monkeypatch):
    main(["train", "sle", "--config", "scenes.yaml"])
    assert called[-1][-1] == str(ROOT / "recipes/configs/sle_blip/scenes.yaml")
    main(["train", "--traceback", "sle", "--config=scenes.yaml", "--seed=1"])
    assert called[-1][-4:] == ["--config", called[0][-1], "--seed=1", "--traceback"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenes.yaml").write_text("alpha: 0.6")  # the user's file comes first
    main(["train", "sle", "--config", "scenes.yaml"])
    assert called[-1][-1] == "scenes.yaml"


def test_several_processes_go_through_accelerate(called):
    main(["train", "--processes", "2", "--accelerate_config", "ddp.yaml", "smile", "--seed", "1"])
    config = str(ROOT / "recipes/accelerate/ddp.yaml")
    recipe = [str(ROOT / "recipes/smile_blip.py"), "--seed", "1"]
    assert called == [["launch", "--num_processes", "2", "--config_file", config, *recipe]]


def test_launcher_returns_the_exit_code_of_the_processes(monkeypatch, tmp_path):
    import accelerate.commands.launch as accelerate_launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from hf_captionrl.cli.train import launch

    def failing(error):
        def run(arguments):
            assert arguments.training_script == "recipe.py"
            raise error

        return run

    monkeypatch.setenv("PYTHONSAFEPATH", "")
    for error, code in (
        (ChildFailedError("w", {1: ProcessFailure(1, 11, 2, str(tmp_path / "none"))}), 2),
        (ChildFailedError("w", {1: ProcessFailure(1, 11, -9, str(tmp_path / "none"))}), 137),
        (SignalException("ended", signal.SIGTERM), 143),
        (subprocess.CalledProcessError(2, ["x"]), 2),
        (subprocess.CalledProcessError(-15, ["x"]), 143),
    ):
        monkeypatch.setattr(accelerate_launch, "launch_command", failing(error))
        assert launch(["--num_processes", "2", "recipe.py", "--seed", "1"]) == code


def test_wheel_contains_every_recipe_and_configuration():
    assert {file for file, _ in METHODS.values()} == {file.name for file in (ROOT / "recipes").glob("*.py")}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    carried = {file for files in listed.values() for pattern in files for file in ROOT.glob(pattern)}
    assert {f for f in (ROOT / "recipes").rglob("*") if f.is_file() and "__pycache__" not in f.parts} <= carried
    for target, files in listed.items():  # `recipe_path` looks there
        for pattern in files:
            assert target == f"share/hf_captionrl/{Path(pattern).parent.as_posix()}"
