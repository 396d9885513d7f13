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
from tests.apps.boosting.server import ChatServer

SHORT = [
    *("--max_train_rows", "16", "--num_train_epochs", "1", "--pretrain_epochs", "1"),
    *("--answer_max_new_tokens", "6", "--disable_tqdm", "true", "--seed", "3"),
]


def rate(messages):
    """8 for the candidate and 5 for the reference, in the order in which they are shown."""
    text = messages[-1]["content"]
    references = [q.reference for q in load_questions(recipe.DATA / "questions.jsonl")]
    return "5 8" if any(f"<answer 1>\n{reference}\n" in text for reference in references) else "8 5"


def judged(*arguments):
    with ChatServer(rate) as server:
        recipe.main([*arguments, "--judge", "endpoint", "--judge_base_url", server.url, "--judge_model", "m"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The default run, made small, with a judge."""
    folder = tmp_path_factory.mktemp("run") / "out"
    judged("--output_dir", str(folder), *SHORT)
    return folder


def rows_of(folder: Path) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads((folder / "results.json").read_text())["rows"]}


def test_the_table(run):
    rows = rows_of(run)
    assert list(rows) == ["start", "MLE", "SMILE (sentence)", "SMILE (window of 16)", "SMILE", "references"]
    assert rows["SMILE"]["overall"] == pytest.approx(8 / 5)
    assert rows["MLE"]["fermi"] == pytest.approx(8 / 5)
    assert rows["SMILE"]["overall_ci"] == [pytest.approx(1.6)] * 2
    assert rows["SMILE"]["judge_failed"] == 0
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
    judged("--output_dir", str(tmp_path / "again"), "--answers", str(run / "answers.jsonl"))
    assert not (tmp_path / "again" / "model").exists()
    assert rows_of(tmp_path / "again")["SMILE"] == rows_of(run)["SMILE"]


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
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for ending in ("jsonl", "parquet"):
        found = load_instructions(tmp_path / f"rows.{ending}", exclude=[format_prompt("Say bye.")])
        prompts = ["Instruction: Add.\nInput: 1 and 2\nAnswer:\n", "Instruction: Say hello.\nAnswer:\n"]
        assert (found["prompt"][:], found["completion"][:]) == (prompts, ["3", "Hello"])
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "answer": "b"}')
    with pytest.raises(ValueError, match="column 'output'"):
        load_instructions(tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--judge", "endpoint", "--judge_base_url", "http://localhost"], "judge_model"),
        (["--judge", "endpoint", "--judge_model", "m"], "judge_base_url"),
        (["--model_name_or_path", "gpt2", "--pretrain_epochs", "1"], "pretrain_epochs"),
        (["--window_tokens", "1"], "window_tokens"),
        (["--resume_from_checkpoint", "some/folder"], "resume_from_checkpoint"),
        (["--answers", "unfinished.jsonl"], "lacks an answer to"),
        (["--model_init_kwargs", '{"trust_remote_code": true}'], "trust_remote_code"),
    ],
)
def test_bad_arguments(tmp_path, monkeypatch, arguments, name):
    monkeypatch.chdir(tmp_path)
    Path("unfinished.jsonl").write_text(json.dumps({"model": "SMILE", "question_id": "generic-1", "answer": "a"}))
    with pytest.raises(ValueError, match=name):
        recipe.main(["--output_dir", str(tmp_path / "out"), "--use_cpu", *arguments])
