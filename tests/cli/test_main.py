"""Help that answers at once, exit codes, and bad usage of every command."""

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from hf_captionrl.cli import main
from hf_captionrl.cli.main import build_parser

main_module = importlib.import_module("hf_captionrl.cli.main")  # whose name the function hides
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("argv", [[], ["nothing"], ["caption"], ["metrics", "path"]])
def test_bad_usage_exits_with_2(argv, capsys):
    assert main(argv) == 2
    assert "usage: captionrl" in capsys.readouterr().err


def fail_with(monkeypatch, error):
    def run(arguments):
        raise error

    monkeypatch.setattr(main_module, "print_path", run)
    return main(["metrics", "path", "x"])


def test_exit_codes_distinguish_bad_input_from_faults(monkeypatch, capsys):
    assert fail_with(monkeypatch, ValueError("two\nlines")) == 2
    assert capsys.readouterr().err == "captionrl metrics: error: two lines\n"
    assert fail_with(monkeypatch, FileNotFoundError("gone")) == 2
    assert fail_with(monkeypatch, OSError(28, "No space left on device")) == 1
    assert fail_with(monkeypatch, TypeError("a fault")) == 1
    assert "TypeError: a fault (--traceback shows where)" in capsys.readouterr().err
    assert main(["metrics", "path", "x", "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert fail_with(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "captionrl: interrupted.\n"


def test_reader_that_stops_early_is_not_an_error(monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["metrics", "path", "clip_score"]) == 0
        assert main(["--help"]) == 0
    assert capsys.readouterr().err == ""


def leaves(parser, path=()):
    """Parsers of all commands and subcommands, by their words."""
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not inner:
        return {path: parser}
    return {k: v for name, below in inner[0].choices.items() for k, v in leaves(below, (*path, name)).items()}


PARSER = build_parser()
COMMANDS = leaves(PARSER)


def examples(text):
    """Lines of a help that show the command, continued ones in one piece."""
    lines = re.sub(r" \\\n +", " ", text).splitlines()
    return [line.split("   ")[0].split(" >")[0] for line in lines if line.startswith("  captionrl ")]


@pytest.mark.parametrize("name", main_module.WITHDRAWN)
def test_a_withdrawn_command_names_what_replaces_it(name, capsys):
    assert main([name, "scenes", "--output", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert main_module.WITHDRAWN[name] in line
    assert (name,) not in COMMANDS
    assert {command.split()[0] for command in re.findall("`captionrl ([^`]+)`", line)} <= {
        path[0] for path in COMMANDS
    }


@pytest.mark.parametrize("columns", [80, 100])
def test_help_has_examples_that_parse_and_folds_to_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    whole = {path: parser.format_help() for path, parser in COMMANDS.items()}
    assert max(len(line) for text in whole.values() for line in text.splitlines()) > 120
    monkeypatch.setenv("COLUMNS", str(columns))
    for path, parser in COMMANDS.items():
        text = parser.format_help()
        long = [line for line in text.splitlines() if len(line) > columns]
        assert long == []
        assert "".join(text.replace("\\\n", "").split()).endswith(
            "".join(whole[path].replace("\\\n", "").split())[-300:]
        )  # nothing is lost
        found = [line for line in examples(text) if line.split()[1 : 1 + len(path)] == list(path)]
        assert found, text
        for line in found:
            assert PARSER.parse_args(shlex.split(line, comments=True)[1:]).function


def needed(parser, option):
    """Values for what a command needs besides an option."""
    first = {id(action): action for action in parser._actions if action.required and action is not option}
    for group in parser._mutually_exclusive_groups:
        if group.required:
            first |= {id(group._group_actions[-1]): group._group_actions[-1]}
    words = [[*action.option_strings[:1], next(iter(action.choices or ["x"]))] for action in first.values()]
    return [word for pair in sorted(words, key=len, reverse=True) for word in pair]


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e308", "-1e308", str(10**20), "-1"])
def test_a_number_that_no_option_takes_is_refused_before_anything_is_loaded(value, monkeypatch, capsys):
    accepts_minus_one = {"--length_penalty": "beams", "--copy_threshold": "cosine", "--reward_weights": "penalties"}
    real, number = main_module._load, 0

    def only_options(path):
        assert path.endswith("Options"), f"{path} has been loaded"
        return real(path)

    monkeypatch.setattr(main_module, "_load", only_options)
    for path, parser in COMMANDS.items():
        for option in parser._actions:
            name = next(iter(option.option_strings), None)
            if getattr(option.type, "__name__", "") not in ("int", "float") or (
                value == "-1" and name in accepts_minus_one
            ):
                continue
            assert main([*path, f"{name}={value}", *needed(parser, option)]) == 2
            last = capsys.readouterr().err.splitlines()[-1]
            assert last.startswith("captionrl")
            assert option.dest in last
            number += 1
    assert number > 90


DEEP = "[" * 100_000 + "]" * 100_000
LONG = (
    f'image_id,file_name,image,caption,prompt\n0,0.png,0.png,"{"a dog " * 25_000}",x\n'  # above csv.field_size_limit
)


@pytest.mark.parametrize(
    ("words", "name", "content"),
    [
        ("caption scenes:blip-mle --output FILE", "a.jsonl", f'{{"image_id": "a", "caption": {DEEP}}}\n'),
        ("caption scenes:blip-mle --output FILE", "a.jsonl", f'{{"image_id": "a", "caption": {DEEP}}}'),
        ("caption scenes:blip-mle --dataset FILE", "a.json", f'{{"images": {DEEP}}}'),
        ("caption scenes:blip-mle --dataset FILE", "a.jsonl", f'{{"image": {DEEP}}}'),
        ("caption scenes:blip-mle --dataset FILE", "a.csv", LONG),
        ("evaluate --captions FILE", "a.json", DEEP),
        ("evaluate --captions FILE", "a.jsonl", DEEP),
        ("evaluate --captions FILE", "a.csv", LONG),
        ("evaluate --captions GOOD --references FILE", "a.json", DEEP),
        ("evaluate --captions GOOD --max_images 1 --bags FILE", "a.json", DEEP),
        ("evaluate --captions GOOD", "good.run.json", DEEP),
        ("pairs --reward cider --captions FILE", "a.jsonl", DEEP),
        ("album scenes --scorer scenes:clip-reward --captions FILE", "a.jsonl", DEEP),
        ("album scenes --scorer scenes:clip-reward --captions FILE", "a.csv", LONG),
        ("album FILE --scorer scenes:clip-reward", "a.jsonl", DEEP),
        ("card .", "captioner.json", DEEP),
    ],
)
def test_a_file_that_no_reader_takes_is_named_in_one_line(tmp_path, monkeypatch, capsys, words, name, content):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    (tmp_path / "good.jsonl").write_text('{"image_id": "test-00000", "caption": "a pig"}\n')
    told = {"FILE": name, "GOOD": "good.jsonl"}
    assert main([told.get(word, word) for word in words.split()]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("captionrl")
    assert path.name in last
    assert len(last) < 500


HELP = """
import json, sys, time
start = time.process_time()
from hf_captionrl.cli.main import build_parser
import argparse

def texts(parser):
    found = [parser.format_help()]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                found += texts(inner)
    return found

helps = texts(build_parser())
here = time.process_time() - start
heavy = {"torch", "transformers", "numpy", "datasets", "PIL", "pyarrow", "rich", "jinja2", "gradio", "huggingface_hub"}
loaded = sorted(heavy & set(sys.modules))
start = time.process_time()
import transformers.models.auto.modeling_auto, torch
print(json.dumps({"loaded": loaded, "helps": len(helps), "seconds": here, "torch": time.process_time() - start}))
"""


def test_help_imports_nothing_heavy_and_is_fast():
    """Time of all help texts, compared with one import of torch and transformers."""
    run = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["loaded"] == []
    assert found["helps"] > len(COMMANDS)
    assert found["seconds"] < found["torch"] / 4


# --- Bad usage: exit code 2, a last line that names what is wrong, and no file is written or changed ---

CAPTION = "caption scenes:blip-mle --output x.jsonl"
ENDPOINT = "caption seer --endpoint http://127.0.0.1:9/v1 --dataset photos --output x.jsonl --tries 1"
EVALUATE = "evaluate --captions a.jsonl"
PAIRS = "pairs --captions a.jsonl b.jsonl --dataset scenes --max_images 6 --output pairs.parquet"
ALBUM = "album photos --scorer scenes:siglip-held-out"
AGREEMENT = "agreement --benchmark flickr8k-expert --data_root ."
USES = [
    ("bags --output bags.csv", "--output"),
    ("bags --mode neighbours --bag_sizes 3", "--bag_sizes"),
    ("bags --bag_sizes 5 --max_images 4", "--bag_sizes"),
    (f"{CAPTION} --num_return_sequences 5", "--num_beams"),
    (f"{CAPTION} --temperature 0", "temperature"),
    (f"{CAPTION} --split nowhere", "'nowhere'"),
    (f"{CAPTION} --dataset no/such/file.jsonl", "no/such/file.jsonl"),
    (f"{CAPTION} --data_dir photos", "--data_dir"),
    (f"{CAPTION} --output x.tsv", "--output"),
    (f"{CAPTION} --output photos", "--output"),
    (f"{CAPTION} --api_key_env SOME_KEY", "--api_key_env"),
    (f"{CAPTION} --processes 1", "x'"),
    (f"{CAPTION} --output x --batch_size 2 --processes 2 --rows_per_shard 5", "--batch_size"),
    (f"{ENDPOINT} --num_beams 4", "--num_beams"),
    (f"{ENDPOINT} --num_return_sequences 3", "--do_sample"),
    (f"{ENDPOINT} --processes 2", "--processes"),
    (f"{ENDPOINT} --dtype bfloat16", "--dtype"),
    (f"{ENDPOINT} --min_new_tokens 5", "--min_new_tokens"),
    (f"{ENDPOINT} --top_k 5", "--top_k"),
    (f"{ENDPOINT} --timeout_s 0", "timeout_s"),
    (f"{ENDPOINT} --timeout_s inf", "timeout_s"),
    (f"{ENDPOINT} --do_not_mention a ' '", "--do_not_mention"),
    (f"{ENDPOINT} --endpoint http://me:secret@127.0.0.1/v1", "api_key_env"),
    (f"{ENDPOINT} --endpoint ftp://127.0.0.1", "ftp://127.0.0.1"),
    (f"{ENDPOINT} --endpoint 'http://[::1/v1'", "base_url"),
    (f"{ENDPOINT} --endpoint http://127.0.0.1:99999/v1", "base_url"),
    (f"{ENDPOINT} --endpoint 'http://127.0.0.1/v1\n'", "base_url"),
    (f"{ENDPOINT} --endpoint http://127.0.0.1/v1#part", "base_url"),
    (f"{ENDPOINT} --api_key_env NO_SUCH_KEY", "NO_SUCH_KEY"),
    (f"{EVALUATE} --names a b", "--names"),
    (f"{EVALUATE} --names references", "'references'"),
    (f"{EVALUATE} --bags nowhere.json", "nowhere.json"),
    (f"{EVALUATE} --bags b.jsonl --suite smile", "--bags"),
    (f"{EVALUATE} --pool b.jsonl --scorer none", "--pool"),
    (f"{EVALUATE} --references nowhere.json", "nowhere.json"),
    (f"{EVALUATE} --references others.jsonl", "others.jsonl"),
    (f"{EVALUATE} --references b.jsonl --scorer scenes:clip-reward", "--scorer"),
    (f"{EVALUATE} --references b.jsonl --split test", "--split"),
    (
        f"{EVALUATE} --references b.jsonl --dataset imagefolder --data_dir nowhere --scorer scenes:clip-reward",
        "nowhere",
    ),
    (f"{PAIRS} --reward cider --output captions.jsonl", "--output"),
    (f"{PAIRS} --reward meteorite", "'meteorite'"),
    (f"{PAIRS} --reward cider --margin 99", "--margin"),
    (f"{PAIRS} --reward cider --captions a.jsonl", "two different"),
    (f"{ALBUM} --output o.txt", "--output"),
    (f"{ALBUM} --output mine.csv", "--overwrite"),
    (f"{ALBUM} --captions nothing.jsonl", "nothing.jsonl"),
    (f"{ALBUM} --endpoint http://127.0.0.1:9/v1", "--model"),
    (f"{ALBUM} --endpoint http://127.0.0.1:9/v1 --model seer --num_beams 3", "--num_beams"),
    (f"{ALBUM} --endpoint http://127.0.0.1:9/v1 --model seer --min_new_tokens 41", "--min_new_tokens"),
    (f"{ALBUM} --endpoint http://127.0.0.1:9/v1 --model seer --trigger ''", "trigger"),
    ("boost --output out --text captioner:scenes:blip-mle", "text"),
    ("boost --output out --text openai:m --text_url ''", "text_url"),
    ("boost --output out --embed_images --no_images", "embed_images"),
    (f"{AGREEMENT} --benchmark flickr8k-cf", "CrowdFlowerAnnotations.txt"),
    (f"{AGREEMENT} --metrics clip_score", "--scorer"),
    (f"{AGREEMENT} --metrics clair --judge gpt-4", "--judge"),
    (f"{AGREEMENT} --judge transformers:m --judge_url http://127.0.0.1:1/v1", "--judge_url"),
    ("train --processes 0 smile", "processes is 0"),
    ("train gan", "invalid choice"),
    ("train smile --config nowhere.yaml", "recipes/configs/smile_blip/nowhere.yaml is neither"),
]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("words", "named"), USES)
def test_bad_usage_is_refused_in_one_line(tmp_path, monkeypatch, capsys, words, named):
    monkeypatch.chdir(tmp_path)
    for name, image, caption in (("a", "test-00000", "a pig"), ("b", "test-00000", "two pigs"), ("others", "z", "?")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"image_id": image, "caption": caption}) + "\n")
    (tmp_path / "mine.csv").write_text("mine")
    rated = [{"filename": f"{n}.jpg", "sentences": [{"raw": "a pig"}, {"raw": f"{n} pigs"}]} for n in range(2)]
    (tmp_path / "dataset_flickr8k.json").write_text(json.dumps({"images": rated}))
    (tmp_path / "ExpertAnnotations.txt").write_text("0.jpg\t1.jpg#0\t1\t1\t2\n1.jpg\t0.jpg#1\t1\t3\t1\n")
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "photos" / "a.png")
    before = contents(tmp_path)
    assert main(shlex.split(words)) == 2
    error = capsys.readouterr().err
    last = error.splitlines()[-1]
    assert last.startswith(f"captionrl {words.split()[0]}")
    assert named in last
    assert "Traceback" not in error
    assert "secret" not in last
    assert contents(tmp_path) == before
