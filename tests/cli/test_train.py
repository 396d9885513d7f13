"""`captionrl train` runs the recipe that it names, with the arguments as they are."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hf_captionrl.cli import main, train
from hf_captionrl.cli.train import METHODS, recipe_path

ROOT = Path(__file__).parents[2]


@pytest.fixture
def called(monkeypatch):
    """The command that would replace this process."""
    commands = []
    monkeypatch.setattr(os, "execv", lambda file, command: commands.append(command))
    return commands


def test_recipe_gets_its_arguments_unchanged(called):
    assert main(["train", "smile", "--max_steps", "3", "--config", "x/y.yaml", "--help"]) == 0
    assert called == [
        [
            sys.executable,
            "-P",
            str(ROOT / "recipes/smile_blip.py"),
            "--max_steps",
            "3",
            "--config",
            "x/y.yaml",
            "--help",
        ]
    ]


def test_configuration_is_found_by_its_name(called, tmp_path, monkeypatch):
    main(["train", "sle", "--config", "scenes.yaml"])
    assert called[-1][-1] == str(ROOT / "recipes/configs/sle_blip/scenes.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenes.yaml").write_text("alpha: 0.6")  # the user's file comes first
    main(["train", "sle", "--config", "scenes.yaml"])
    assert called[-1][-1] == "scenes.yaml"


def test_configuration_name_after_an_equals_sign(called):
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
    launcher = str(ROOT / "hf_captionrl/cli/train_launch.py")
    assert called[-1][:6] == [sys.executable, "-P", launcher, "--num_processes", "2", "--config_file"]
    assert called[-1][6:] == [
        str(ROOT / "recipes/accelerate/ddp.yaml"),
        str(ROOT / "recipes/smile_blip.py"),
        "--seed",
        "1",
    ]


PLANTED = """
import os
open(os.environ["PLANTED"], "a").write(__name__ + "\\n")
raise SystemExit("the working folder is on the path")
"""
# A recipe that records what each process imports, and from where.
RECIPE = """
import json, os, sys
import accelerate
from hf_captionrl.utils.console import run_main

def main(argv=None):
    rank, cwd = os.environ.get("RANK", "0"), os.getcwd()
    on_path = [p for p in sys.path if os.path.realpath(p or cwd) == os.path.realpath(cwd)]
    with open(os.path.join(os.environ["SAID"], rank), "w") as file:
        json.dump([accelerate.__file__, on_path, sys.argv[1:]], file)
    if "--bad" in sys.argv:
        raise ValueError("bag_size is 7.\\nUse 8.")
    if "--broken" in sys.argv:
        raise TypeError("a fault")

if __name__ == "__main__":
    run_main(main)
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A folder with files that no process may import, and a function that runs a recipe there."""
    work, recipes, said = tmp_path / "work", tmp_path / "recipes", tmp_path / "said"
    for folder in (work, recipes, said):
        folder.mkdir()
    for name in ("accelerate", "torch", "transformers", "hf_captionrl"):
        (work / f"{name}.py").write_text(PLANTED)
    (recipes / "smile_blip.py").write_text(RECIPE)
    monkeypatch.setattr(train, "recipe_path", lambda *parts: recipes.joinpath(*parts))
    env = {**os.environ, "PLANTED": str(tmp_path / "planted"), "SAID": str(said), "ACCELERATE_USE_CPU": "true"}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)}

    def start(called, *options):
        main(["train", *options])
        done = subprocess.run(called[-1], cwd=work, env=env, capture_output=True, text=True, check=False, timeout=240)
        assert not (tmp_path / "planted").exists(), (tmp_path / "planted").read_text()
        return done, [json.loads(file.read_text()) for file in sorted(said.iterdir())]

    return start


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_no_process_imports_from_the_working_folder(called, planted, processes, tmp_path):
    (tmp_path / "two.yaml").write_text(two_processes())
    options = ["--accelerate_config", str(tmp_path / "two.yaml")] if processes == "2" else []
    done, said = planted(called, "--processes", processes, *options, "smile", "--bad")
    assert len(said) == int(processes)
    for file, on_path, argv in said:
        assert "site-packages" in file
        assert on_path == []
        assert argv == ["--bad"]
    # An error of the user is one line for all processes, and the exit code is theirs.
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "bag_size" in line] == [
        "smile_blip.py: error: bag_size is 7. Use 8."
    ]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def two_processes():
    """A configuration as of `accelerate config`; ACCELERATE_USE_CPU takes it to the processor."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = recipe_path("accelerate", "ddp.yaml").read_text()
    for key, value in {"num_processes": 2, "main_process_port": port, "mixed_precision": "'no'"}.items():
        text = re.sub(rf"^{key}:.*\n", "", text, flags=re.MULTILINE) + f"{key}: {value}\n"
    return text


def test_launcher_returns_the_exit_code_of_the_processes(monkeypatch, capsys, tmp_path):
    import accelerate.commands.launch as accelerate_launch
    import accelerate.utils.launch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    from hf_captionrl.cli.train_launch import launch

    def failing(error):
        def run(arguments):
            assert arguments.training_script == "recipe.py"
            raise error

        return run

    monkeypatch.setattr(accelerate.utils.launch, "env_var_path_add", accelerate.utils.launch.env_var_path_add)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setenv("CAPTIONRL_ERROR_FOLDER", "")
    monkeypatch.setenv("PYTHONPATH", "before")
    for error, code in (
        (ChildFailedError("w", {1: ProcessFailure(1, 11, 2, str(tmp_path / "none"))}), 2),
        (ChildFailedError("w", {1: ProcessFailure(1, 11, -9, str(tmp_path / "none"))}), 137),
        (SignalException("ended", signal.SIGTERM), 143),
        (subprocess.CalledProcessError(2, ["x"]), 2),
        (subprocess.CalledProcessError(-15, ["x"]), 143),
    ):
        monkeypatch.setattr(accelerate_launch, "launch_command", failing(error))
        assert launch(["--num_processes", "2", "recipe.py", "--seed", "1"]) == code
    assert "process 1 ended with exit code 137" in capsys.readouterr().err
    # DeepSpeed's processes get no working folder on PYTHONPATH either.
    assert accelerate.utils.launch.env_var_path_add("PYTHONPATH", "/somewhere") == "before"


def test_traceback_option_before_the_method_reaches_the_recipe(called):
    main(["train", "--traceback", "smile", "--seed", "1"])
    assert called[-1][-3:] == ["--seed", "1", "--traceback"]


def test_recipes_and_methods_correspond():
    recipes = {file.name for file in (ROOT / "recipes").glob("*.py")}
    assert {file for file, _ in METHODS.values()} == recipes


def test_wheel_contains_every_recipe_and_configuration():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    patterns = [pattern for files in listed.values() for pattern in files]
    carried = {file for pattern in patterns for file in ROOT.glob(pattern)}
    wanted = {f for f in (ROOT / "recipes").rglob("*") if f.is_file() and "__pycache__" not in f.parts}
    assert wanted <= carried
    for target, files in listed.items():  # `recipe_path` looks there
        for pattern in files:
            assert target == f"share/hf_captionrl/{Path(pattern).parent.as_posix()}"


def test_recipes_of_a_wheel_are_found(tmp_path, monkeypatch):
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
