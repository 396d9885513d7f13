"""Bad input to a recipe: one line on stderr that names value and remedy, exit code 2, and a traceback only if asked for."""

import json
import re
import sys
from pathlib import Path

import pytest

from hf_captionrl.apps.experiments import report
from hf_captionrl.utils import console
from hf_captionrl.utils.console import is_input_error, run_main
from recipes import self_retrieval_blip, smile_blip

SMALL = [
    *("--max_train_images", "8", "--max_eval_images", "8", "--max_test_images", "8", "--use_cpu", "--max_steps", "1"),
    *("--perplexity_name_or_path", "none", "--scorer_name_or_path", "none", "--held_out_scorer_name_or_path", "none"),
    *("--metric_for_best_model", "length", "--early_evaluations"),
]


OPTIONS = {
    "--lerning_rate 1": "'--lerning_rate'.* Use '--learning_rate'",
    "--config nowhere.yaml": r"nowhere\.yaml",
    "--per_device_train_batch_size 0": "per_device_train_batch_size",
    "--max_train_images 0": "max_train_images",
    "--load_best_model_at_end true --eval_strategy no --save_strategy epoch": "load_best_model_at_end",
    "--resume_from_checkpoint model/checkpoint-40": "resume_from_checkpoint",  # of which training
    "--data_dir photos --dataset_name scenes": "imagefolder",
    "--dataset_name imagefolder --data_dir nowhere": "'nowhere'",
    "--dataset_name owner/missing": "'owner/missing'",
    "--model_name_or_path owner/missing --dataset_name scenes": "'owner/missing'",
    "--model_name_or_path text --dataset_name scenes": "model type 'bert'",
    "--output_dir file/out": "Not a directory",
}
FILES = {
    "- 1": r"run\.yaml' holds a list",
    "a: [": r"run\.yaml' is not valid YAML",
    "lerning_rate: 1": "'lerning_rate'.* Use 'learning_rate'",
    "max_train_images: 2.5": r"run\.yaml: .*--max_train_images.*'2\.5'",
    "lora_r:": "lora_r .*int",
    "seed: [1]": "seed .*a single value",
    "compare_mle_weights: 0.5": "compare_mle_weights .*a list",
    "compare_mle_weights: [2]": "mle_weight is 2",
}
KINDS = [(words, "", said) for words, said in OPTIONS.items()]
KINDS += [("--config run.yaml", text, said) for text, said in FILES.items()]


def run(main, argv, monkeypatch, capsys):
    """Exit code and stderr of a recipe as a program."""
    monkeypatch.setattr(sys, "argv", ["recipe.py", *argv])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        run_main(main)
    return stop.value.code, capsys.readouterr().err


@pytest.mark.parametrize(("words", "text", "message"), KINDS)
def test_one_line_and_exit_code_2(words, text, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("run.yaml").write_text(text)
    Path("text").mkdir()
    Path("text/config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    code, said = run(smile_blip.main, [*SMALL, "--output_dir", "out", *words.split()], monkeypatch, capsys)
    assert code == 2
    assert "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith("recipe.py: error: ")]
    assert len(lines) == 1
    assert said.rstrip().endswith(lines[0])
    assert said.count("usage:") == 0
    assert re.search(message, lines[0]), lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bag_schedule 7:x", "bag_schedule"),
        ("--baseline best", "baseline"),
        ("--variants {", "variants"),
        ("--held_out_scorer_name_or_path none", "held_out_scorer"),
        ("--num_train_epochs 0 --max_steps 0 --push_to_hub", "push_to_hub"),
        ("--bag_schedule 99 --per_device_train_batch_size 8 --gradient_accumulation_steps 1", "A bag of 99"),
    ],
)
def test_bad_input_to_self_retrieval(words, message, tmp_path, monkeypatch, capsys):
    own = [*SMALL[:7], "--perplexity_name_or_path", "none", "--output_dir", str(tmp_path / "out"), "--variants", "{}"]
    own += ["--max_train_images", "16", "--max_steps", "1", "--feature_cache_dir", str(tmp_path / "cache")]
    code, said = run(self_retrieval_blip.main, [*own, *words.split()], monkeypatch, capsys)
    assert code == 2
    assert message in said.splitlines()[-1]


@pytest.mark.parametrize(
    "words",
    [
        *(f"--{name} nowhere/x" for name in ("model", "scorer", "held_out_scorer", "perplexity_model")),
        "--model outputs/photographs/flickr8k/mle/model",
    ],
)
def test_what_is_not_there_is_said_before_the_data_are_read(words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "load_data", lambda *args, **named: pytest.fail("the data were read"))
    code, said = run(
        smile_blip.main, [*SMALL, "--output_dir", str(tmp_path / "out"), *words.split()], monkeypatch, capsys
    )
    assert code == 2
    assert words.split()[1] in said.splitlines()[-1]


def test_the_traceback_is_there_for_the_asking(monkeypatch, capsys):
    code, said = run(smile_blip.main, ["--lerning_rate", "1", "--traceback"], monkeypatch, capsys)
    assert code == 2
    assert "Traceback (most recent call last)" in said
    assert said.splitlines()[-1].startswith("recipe.py: error: Unknown argument '--lerning_rate'")
    with pytest.raises(ZeroDivisionError):  # a fault keeps its own
        run_main(lambda: 1 / 0)


def error_of(function):
    try:
        function()
    except Exception as error:
        return error


def test_errors_of_libraries_within_training_are_faults():
    def training_step():
        raise ValueError("of a library")

    assert not is_input_error(error_of(training_step))
    assert is_input_error(error_of(lambda: int("x")))
    # The package's errors say what to change, wherever they come from.
    source = "def training_step():\n    raise ValueError('of the package')\n"
    names = {}
    exec(compile(source, str(Path(console.__file__).with_name("trainers") / "x.py"), "exec"), names)
    assert is_input_error(error_of(names["training_step"]))


def test_a_hub_that_does_not_answer_is_not_bad_input():
    def failing(cause):
        raise OSError("We couldn't connect to the Hub") from cause

    refused, offline = (type(n, (ConnectionError,), {})() for n in ("ConnectError", "OfflineModeIsEnabled"))
    assert not is_input_error(error_of(lambda: failing(refused)))
    assert is_input_error(error_of(lambda: failing(None)))
    assert is_input_error(error_of(lambda: failing(offline)))
    assert not is_input_error(OSError(28, "No space left on device"))
