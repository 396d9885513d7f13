"""The first hour of a photographer, a researcher and a user of TRL: each in a new folder, with the programs that the pages name.

Small stand-ins replace downloads. Nothing on stderr may look like a fault, and no warning may be one that a user cannot act on.
"""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_captionrl.apps.instruct.instructions import tiny_llama
from hf_captionrl.data.features import training_images
from hf_captionrl.scenes import load_scenes
from tests.tiny import write_photos
from tests.tiny.chat import tiny_chat

ROOT = Path(__file__).parents[1]
SCORERS = "--scorer_name_or_path scenes:clip-reward --held_out_scorer_name_or_path scenes:siglip-held-out --perplexity_name_or_path none"
HELD_OUT = "--scorer scenes:siglip-held-out --language_model none"
NOISE = re.compile(r"\bwarn|deprecat|traceback|pin_memory", re.IGNORECASE)


def run(folder, *words):
    """What a program that ended with 0 printed, without warnings that a user cannot act on."""
    # As a user's shell has it, apart from the network
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TRANSFORMERS_", "PYTHONWARN"))}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")]), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in (done.stdout + done.stderr).splitlines() if NOISE.search(line)] == []
    return done.stdout + done.stderr


def captionrl(folder, line):
    return run(folder, "-m", "hf_captionrl.cli", *line.split())


def photos(folder, number):
    return write_photos(folder, load_scenes(num_train=0, num_validation=0, num_test=number)["test"], "IMG_{:03d}.png")


@pytest.mark.slow
def test_a_photographer_from_the_first_captions_to_an_album(tmp_path):
    photos(tmp_path / "photos", 51).rename(tmp_path / "later.jsonl")
    source = "--dataset imagefolder --data_dir photos"
    said = captionrl(tmp_path, f"caption scenes:blip-mle {source} --output captions.jsonl")
    assert "captions of 51 of 51 images" in said
    (tmp_path / "later.jsonl").rename(tmp_path / "photos/metadata.jsonl")
    said = captionrl(
        tmp_path,
        f"train smile --model_name_or_path scenes:blip-mle --dataset_name imagefolder --data_dir photos {SCORERS} "
        "--prompt a --num_train_epochs 1 --output_dir outputs/photos",
    )
    assert "1 of 1: SMILE" in said  # one model, as nothing else was asked for
    assert sorted(path.name for path in (tmp_path / "outputs/photos").glob("model*")) == ["model"]
    said = captionrl(tmp_path, f"caption outputs/photos/model {source} --split test --output smile.jsonl")
    assert "captions of 5 of 5 images" in said
    captionrl(
        tmp_path, f"evaluate --captions captions.jsonl smile.jsonl {source} --split test --suite smile {HELD_OUT}"
    )
    assert json.loads((tmp_path / "outputs/evaluate/comparison.json").read_text())["num_images"] == 5
    # Without --split test, the 41 photographs of the training are left out.
    said = captionrl(tmp_path, f"caption outputs/photos/model {source} --output others.jsonl")
    assert "41 of 51 images" in said
    captionrl(
        tmp_path,
        "album photos --model outputs/photos/model --scorer scenes:clip-reward --max_characters 125 --output alt.csv alt.html",
    )
    with (tmp_path / "alt.csv").open(newline="", encoding="utf-8-sig") as file:
        assert len(list(csv.DictReader(file))) == 51
    assert (tmp_path / "alt.html").stat().st_size > 51 * 100
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_researcher_runs_a_row_of_a_paper_on_data_in_its_layout(tmp_path):
    (tmp_path / "coco/images/val2014").mkdir(parents=True)
    images = []
    for number, row in enumerate(load_scenes(num_train=0, num_validation=0, num_test=48)["test"]):
        name = f"COCO_val2014_{number:012d}.jpg"
        row["image"].convert("RGB").save(tmp_path / "coco/images/val2014" / name)
        sentences = [{"raw": text, "tokens": text.split(), "sentid": number} for text in row["captions"]]
        split = ("train", "restval", "val", "test")[min(number // 16, 3) if number < 32 else 2 + number % 2]
        images.append({"filename": name, "filepath": "val2014", "cocoid": number, "imgid": number, "split": split})
        images[-1]["sentences"] = sentences
    (tmp_path / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    coco = "dataset_coco.json --image_root coco/images"
    said = captionrl(
        tmp_path,
        f"train self-retrieval --row discritune/blip --dataset_name {coco} --model_name_or_path scenes:blip-mle {SCORERS} "
        "--total_train_batch_size 16 --max_steps 2 --generation_max_new_tokens 12",
    )
    assert "1 of 1" in said
    out = tmp_path / "outputs/discritune/blip"
    rows = json.loads((out / "results.json").read_text())["rows"]
    assert [row["name"] for row in rows][::2] == ["MLE", "references"]
    assert all(0 <= row["pool_recall_at_1"] <= 1 for row in rows)
    captionrl(tmp_path, f"caption {out / 'model'} --dataset {coco} --output sr.jsonl")
    captionrl(tmp_path, f"evaluate --captions sr.jsonl --dataset {coco} --suite ndlb {HELD_OUT}")
    compared = json.loads((tmp_path / "outputs/evaluate/comparison.json").read_text())
    assert compared["num_images"] == sum(image["split"] == "test" for image in images)


SFT = """
from datasets import load_dataset
from hf_captionrl import SmileSFTConfig, SmileSFTTrainer

trainer = SmileSFTTrainer(
    model="model",
    args=SmileSFTConfig(output_dir="out", num_train_epochs=1, report_to="none"),
    train_dataset=load_dataset("json", data_files="rows.jsonl", split="train"),
)
trainer.train()
trainer.save_model()
print("done:", trainer.state.log_history[-1]["train_loss"] > 0)
"""

GRPO = """
from hf_captionrl import SelfRetrievalGRPOConfig, SelfRetrievalGRPOTrainer, load_captions


def reward_num_unique_chars(completions, **kwargs):
    return [len(set(completion[0]["content"])) for completion in completions]


trainer = SelfRetrievalGRPOTrainer(
    model="model",
    reward_funcs=reward_num_unique_chars,
    train_dataset=load_captions("imagefolder", data_dir="photos", split="all"),
    args=SelfRetrievalGRPOConfig(output_dir="out", max_steps=1, max_completion_length=6, report_to="none"),
)
trainer.train()
trainer.save_model()
print("done:", trainer.state.log_history[-1]["train_runtime"] > 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [SFT, GRPO], ids=["sft", "grpo"])
def test_a_user_of_trl_replaces_the_trainer_of_its_documentation(tmp_path, program):
    questions = {"What is rain?": "Water that falls from clouds.", "Name a fruit.": "An apple. Or a pear."}
    if program is SFT:
        model, processor = tiny_llama([*questions, *questions.values()], vocab_size=300, width=32, layers=1)
        # As TRL asks of templates, the answer is marked.
        processor.chat_template = (
            "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + eos_token }}"
            "{% endgeneration %}{% else %}{{ m['content'] + '\\n' }}{% endif %}{% endfor %}"
        )
        turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in questions.items()]
        (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"messages": turn}) for turn in turns * 8))
    else:
        model, processor = tiny_chat("llava")
        photos(tmp_path / "photos", 8)
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    (tmp_path / "program.py").write_text(program)
    assert "done: True" in run(tmp_path, "program.py")
    assert any((tmp_path / "out").glob("*.safetensors"))
    assert len(training_images(tmp_path / "out")) == (0 if program is SFT else 8)
