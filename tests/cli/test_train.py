"""`captionrl train` runs the recipe that it names, with the arguments as they are."""

import json
import os
import re
import signal
import sys
import tomllib
from pathlib import Path

import pytest

from hf_captionrl.cli import main, train
from hf_captionrl.cli.train import METHODS, recipe_path

ROOT = Path(__file__).parents[2]


@pytest.fixture
def called(monkeypatch):
    """What would take this process's place."""
    commands = []
    monkeypatch.setattr(os, "execv", lambda file, command: commands.append(command))
    return commands


def test_a_recipe_gets_its_arguments_untouched(called):
    assert main(["train", "smile", "--max_steps", "3", "--config", "x/y.yaml", "--help"]) == 0
    assert called == [
        [sys.executable, str(ROOT / "recipes/smile_blip.py"), "--max_steps", "3", "--config", "x/y.yaml", "--help"]
    ]


def test_a_configuration_may_be_named_alone(called, tmp_path, monkeypatch):
    main(["train", "sle", "--config", "scenes.yaml"])
    assert called[-1][-1] == str(ROOT / "recipes/configs/sle_blip/scenes.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenes.yaml").write_text("alpha: 0.6")  # one's own comes first
    main(["train", "sle", "--config", "scenes.yaml"])
    assert called[-1][-1] == "scenes.yaml"


def test_a_configuration_may_be_named_after_an_equals_sign(called):
    main(["train", "sle", "--config=scenes.yaml", "--seed=1"])
    assert called[-1][-3:] == ["--config", str(ROOT / "recipes/configs/sle_blip/scenes.yaml"), "--seed=1"]


def test_ctrl_c_waits_for_the_training_to_save(monkeypatch, capsys):
    class Training:
        def __init__(self, command, **_):
            self.said = Path(command[command.index(str(ROOT / "recipes/smile_blip.py")) - 1])

        def wait(self):
            os.kill(os.getpid(), signal.SIGINT)  # as the terminal does, to this process and to that one
            self.said.write_text(json.dumps({"results": None}))
            return 0

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(train.subprocess, "Popen", Training)
    assert main(["train", "--json", "smile"]) == 0
    assert json.loads(capsys.readouterr().out)["results"] is None
    assert signal.getsignal(signal.SIGINT) is before


def test_several_processes_go_through_accelerate(called):
    main(["train", "--processes", "2", "--accelerate_config", "ddp.yaml", "smile", "--seed", "1"])
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--config_file"]
    assert called[-1][:6] == launch
    assert called[-1][6:] == [
        str(ROOT / "recipes/accelerate/ddp.yaml"),
        str(ROOT / "recipes/smile_blip.py"),
        "--seed",
        "1",
    ]


def test_every_recipe_has_a_method_and_the_other_way_round():
    recipes = {file.name for file in (ROOT / "recipes").glob("*.py")}
    assert {file for file, _ in METHODS.values()} == recipes


def test_a_wheel_carries_every_recipe_and_configuration():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    patterns = [pattern for files in listed.values() for pattern in files]
    carried = {file for pattern in patterns for file in ROOT.glob(pattern)}
    wanted = {f for f in (ROOT / "recipes").rglob("*") if f.is_file() and "__pycache__" not in f.parts}
    assert wanted <= carried
    for target, files in listed.items():  # each lies where `recipe_path` looks for it
        for pattern in files:
            assert target == f"share/hf_captionrl/{Path(pattern).parent.as_posix()}"


def test_outside_a_checkout_recipes_are_found_where_a_wheel_puts_them(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "__file__", str(tmp_path / "site" / "hf_captionrl" / "cli" / "train.py"))
    monkeypatch.setattr(train.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match="pip install -e"):
        recipe_path("smile_blip.py")
    folder = tmp_path / "share/hf_captionrl/recipes"
    folder.mkdir(parents=True)
    (folder / "smile_blip.py").touch()
    assert recipe_path("smile_blip.py") == folder / "smile_blip.py"


def test_bad_input(called, capsys):
    assert main(["train", "--processes", "0", "smile"]) == 2
    assert "--processes is 0" in capsys.readouterr().err
    assert main(["train", "gan"]) == 2
    assert re.search("invalid choice: .gan.", capsys.readouterr().err)
    assert main(["train", "smile", "--config", "nowhere.yaml"]) == 2
    assert "recipes/configs/smile_blip/nowhere.yaml is neither" in capsys.readouterr().err
    assert not called
