"""SMILE for text from the command line's arguments to every file it promises."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hf_captionrl.apps.instruct.instructions import format_prompt, load_instructions
from hf_captionrl.apps.instruct.judges import load_questions
from hf_captionrl.trainers.trl_smile_sft import SmileSFTTrainer
from recipes import smile_llama_lora as recipe

SHORT = [
    *("--max_train_rows", "16", "--num_train_epochs", "1", "--pretrain_epochs", "1"),
    *("--answer_max_new_tokens", "6", "--disable_tqdm", "true", "--seed", "3"),
]


def write_ratings(path: Path) -> Path:
    """A file in which the answers of SMILE are worth 8 beside 5, the others' 4 beside 5."""
    questions = load_questions(recipe.DATA / "questions.jsonl")
    rows = [
        {"model": name, "question_id": q.question_id, "candidate": score, "reference": 5, "candidate_first": first}
        for name, score in (("SMILE", 8), ("MLE", 4))
        for q in questions
        for first in (True, False)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The default run, made small, with a file of ratings."""
    folder = tmp_path_factory.mktemp("run")
    ratings = write_ratings(folder / "ratings.jsonl")
    recipe.main(["--output_dir", str(folder / "out"), *SHORT, "--judge", "file", "--judge_ratings", str(ratings)])
    return folder / "out"


def rows_of(folder: Path) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads((folder / "results.json").read_text())["rows"]}


def test_the_table(run):
    rows = rows_of(run)
    assert list(rows) == ["start", "MLE", "SMILE (sentence)", "SMILE (window of 16)", "SMILE", "references"]
    assert rows["SMILE"]["overall"] == pytest.approx(8 / 5)
    assert rows["MLE"]["fermi"] == pytest.approx(4 / 5)
    assert rows["SMILE"]["overall_ci"] == [pytest.approx(1.6)] * 2
    assert rows["SMILE"]["judge_failed"] == 0
    # No one rated the others, and the table says so.
    assert rows["SMILE (sentence)"]["overall"] is None
    assert "none of the 26 replies" in rows["SMILE (sentence)"]["overall_reason"]
    assert rows["references"]["length"] > 30
    assert json.loads((run / "results.json").read_text())["seed"] == 3


def test_what_is_left_behind(run):
    answers = [json.loads(line) for line in (run / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 5 * 26
    assert {"model", "question_id", "category", "question", "answer"} == answers[0].keys()
    base = AutoModelForCausalLM.from_pretrained(run / "base")
    model = PeftModel.from_pretrained(base, run / "model")
    moved = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert moved
    assert all(p.any() for p in moved)
    assert {"model", "model-mle", "model-smile--sentence", "model-smile--window-of-16"} <= {
        p.name for p in run.iterdir()
    }


def test_answers_can_be_judged_again(run, tmp_path):
    """Nothing is trained for it."""
    ratings = write_ratings(tmp_path / "r.jsonl")
    arguments = ["--answers", str(run / "answers.jsonl"), "--judge", "file", "--judge_ratings", str(ratings)]
    recipe.main(["--output_dir", str(tmp_path / "again"), *arguments])
    assert not (tmp_path / "again" / "model").exists()
    assert rows_of(tmp_path / "again")["SMILE"] == rows_of(run)["SMILE"] | {"judge": "r.jsonl"}


def test_a_second_run_gives_the_same(run, tmp_path):
    recipe.main(["--output_dir", str(tmp_path / "out"), *SHORT, "--compare_scopes", "window"])
    mine, other = rows_of(tmp_path / "out"), rows_of(run)
    assert list(mine) == ["start", "MLE", "SMILE (window of 16)", "SMILE", "references"]
    assert mine["SMILE"]["length"] == other["SMILE"]["length"]
    assert mine["SMILE"].get("overall") is None
    for name in ("model", "base"):
        file = "adapter_model.safetensors" if name == "model" else "model.safetensors"
        assert (tmp_path / "out" / name / file).read_bytes() == (run / name / file).read_bytes()


def test_a_finished_run_resumes_without_training(run, monkeypatch):
    before = (run / "model" / "adapter_model.safetensors").read_bytes()
    steps = []
    original = SmileSFTTrainer.training_step
    monkeypatch.setattr(SmileSFTTrainer, "training_step", lambda *a, **k: steps.append(1) or original(*a, **k))
    recipe.main(["--output_dir", str(run), *SHORT])
    assert not steps
    assert (run / "model" / "adapter_model.safetensors").read_bytes() == before


def test_files_of_instructions(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 and 2", "output": " 3 "},
        {"instruction": "Say hello.", "input": "", "output": "Hello"},
        {"instruction": "Say bye.", "input": None, "output": "Bye"},
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for ending in ("json", "jsonl", "parquet"):
        found = load_instructions(tmp_path / f"rows.{ending}", exclude=[format_prompt("Say bye.")])
        prompts = ["Instruction: Add.\nInput: 1 and 2\nAnswer:\n", "Instruction: Say hello.\nAnswer:\n"]
        assert (found["prompt"][:], found["completion"][:]) == (prompts, ["3", "Hello"])


BAD_INSTRUCTIONS = {
    "column 'output'": '{"instruction": "a", "answer": "b"}',
    "column 'instruction'": '{"text": "a"}',
    "1 of 2 rows have a blank": '{"instruction": "a", "output": " "}\n{"instruction": "a", "output": "b"}',
    r"rows\.jsonl is not valid JSON": "{]",
    "items that are not objects": "[1, 2]",
    r"no file 'rows\.jsonl'": None,
}


@pytest.mark.parametrize("message", BAD_INSTRUCTIONS)
def test_bad_instructions(message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if BAD_INSTRUCTIONS[message] is not None:
        Path("rows.jsonl").write_text(BAD_INSTRUCTIONS[message])
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_instructions(Path("rows.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--judge", "endpoint", "--judge_base_url", "http://localhost"], "judge_model"),
        (["--judge", "endpoint", "--judge_model", "m"], "judge_base_url"),
        (["--judge", "file"], "judge_ratings"),
        (["--model_name_or_path", "gpt2", "--pretrain_epochs", "1"], "pretrain_epochs"),
        (["--window_tokens", "1"], "window_tokens"),
        (["--resume_from_checkpoint", "some/folder"], "resume_from_checkpoint"),
        (["--answers", "unfinished.jsonl"], "'generic-2'"),
        (["--model_init_kwargs", '{"trust_remote_code": true}'], "trust_remote_code"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, arguments, name):
    monkeypatch.chdir(tmp_path)
    Path("unfinished.jsonl").write_text(json.dumps({"model": "SMILE", "question_id": "generic-1", "answer": "a"}))
    with pytest.raises(ValueError, match=name):
        recipe.main(["--output_dir", str(tmp_path / "out"), "--use_cpu", *arguments])
