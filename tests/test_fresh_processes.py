"""What a user runs, in a process of its own: public names, documented Python, pushes by every trainer.

A process is forked from one that has imported torch, transformers, TRL and the other libraries, and nothing of this package: a
test in a process that has imported more than the user would proves nothing.
"""

from __future__ import annotations

import ast
import builtins
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.metrics.evaluate_modules import warm_process
from tests.offline import python_path
from tests.test_docs import blocks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# What stands in for names on the Hub, addresses and sizes of real trainings.
STAND_INS = {
    "Salesforce/blip-image-captioning-base": "blip",
    "openai/clip-vit-base-patch32": "scenes:clip-reward",
    "open_clip:ViT-B-32@laion2b_s34b_b79k": "scenes:siglip-held-out",
    "HuggingFaceTB/SmolVLM-Instruct": "chat",
    "batch_size=20, gradient_accumulation_steps=25": "batch_size=20, max_steps=1",
    "max_completion_length=60": "max_completion_length=8",
    "bank_size=1000": "bank_size=5",
    'SLEConfig("out", ': 'SLEConfig("out", per_device_train_batch_size=5, max_completion_length=12, ',
    "rl_start_epoch=5": "rl_start_epoch=1",
    "num_train_epochs=15": "num_train_epochs=2",
    'SelfRetrievalConfig("out", ': 'SelfRetrievalConfig("out", max_steps=2, per_device_train_batch_size=5, max_completion_length=12, ',
    '"outputs/sr", ': '"outputs/sr", max_steps=2, max_completion_length=12, ',
    "is_multimodal=True": "is_multimodal=True, tries=1",
}
# What a page says in words instead of code, before its block.
BEFORE = {
    "other_trainers.md": """
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained("text"), AutoTokenizer.from_pretrained("text")
rows = Dataset.from_list([{"prompt": "a red cat", "completion": " and a dog"}] * 8)
lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
""",
}


def environment(folder):
    places = {"HF_HOME": str(folder / "home"), "CAPTIONRL_CACHE": str(folder / "cache")}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    return places | offline | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}


def run(code, folder, timeout=200):
    """Exit code and output of a program in a process without this package."""
    ((status, output),) = warm_process.run(
        {"code": code, "cwd": str(folder), "env": environment(folder)}, timeout=timeout
    )
    return status, output


# --- public names ---------------------------------------------------------------------------------------------------


def homes(package):
    """Module that defines the lazy names of a package, and the names."""
    tree = ast.parse(Path(ROOT, *package.split("."), "__init__.py").read_text(encoding="utf-8"))
    guarded = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    for node in (node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)):
        if node.module.startswith("hf_captionrl"):
            yield package, node.module, [alias.name for alias in node.names]


PACKAGES = sorted(".".join(path.relative_to(ROOT).parts[:-1]) for path in (ROOT / "hf_captionrl").rglob("__init__.py"))
NAMES = [home for package in PACKAGES for home in homes(package)]


def test_every_public_name_is_there_in_a_process_that_imported_nothing_else(tmp_path):
    """One process for each module that defines names: those of one module come with it in any case."""
    assert sum(len(names) for *_, names in NAMES) > 150
    jobs = [
        {"code": f"from {package} import {', '.join(names)}", "cwd": str(tmp_path), "env": environment(tmp_path)}
        for package, _, names in NAMES
    ]
    results = [result for start in range(0, len(jobs), 2) for result in warm_process.run(*jobs[start : start + 2])]
    assert [(home, output) for home, (status, output) in zip(NAMES, results, strict=True) if status] == []


def test_a_name_that_is_not_there_is_seen(tmp_path):
    status, output = run("from hf_captionrl.hub import push", tmp_path)
    assert status == 0, output  # a submodule
    status, output = run("import hf_captionrl.hub\nhf_captionrl.hub.push", tmp_path)
    assert status == 1
    assert "has no attribute 'push'" in output


# --- what a run imports ---------------------------------------------------------------------------------------------

IMAGES = """
import numpy as np
from datasets import Dataset
from PIL import Image
pixels = np.random.default_rng(0).integers(0, 255, (8, 32, 32, 3), dtype=np.uint8)
rows = [{"image_id": str(i), "image": Image.fromarray(p), "captions": [f"a dog {i}"]} for i, p in enumerate(pixels)]
data = Dataset.from_list(rows)
few = {"max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
"""
RUNS = {
    "SmileTrainer": """
from hf_captionrl import SmileConfig, SmileTrainer
SmileTrainer("scenes:blip-mle", SmileConfig("out", **few), data).train()
""",
    "SelfRetrievalTrainer": """
from hf_captionrl import SelfRetrievalConfig, SelfRetrievalTrainer, load_scorer
args = SelfRetrievalConfig("out", max_completion_length=8, **few)
SelfRetrievalTrainer("scenes:blip-mle", load_scorer("scenes:clip-reward"), args, data).train()
""",
    "evaluate": """
import evaluate
import hf_captionrl
for name in ("self_retrieval", "caption_diversity", "caption_nlg", "clip_score"):
    evaluate.load(name)
""",
    "load_captioner": """
from hf_captionrl import load_captioner
load_captioner("scenes:blip-mle")
""",
}
COUNT = """
import json, sys
from pathlib import Path
files = {m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "hf_captionrl" and getattr(m, "__file__", 0)}
Path("closure.json").write_text(json.dumps([len(files), sum(len(Path(f).read_text().splitlines()) for f in files)]))
"""


@pytest.mark.parametrize("run_name", RUNS)
def test_a_run_imports_no_more_than_its_limit(run_name, tmp_path):
    """Files and lines of this package after two steps on data in memory: what a reader of the run would read."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["captionrl"]["closures"]
    status, output = run(IMAGES + RUNS[run_name] + COUNT, tmp_path)
    assert status == 0, output
    files, lines = json.loads((tmp_path / "closure.json").read_text())
    assert (files <= limits[run_name][0], lines <= limits[run_name][1]) == (True, True), (files, lines)
    assert files > 10


# --- documented Python ----------------------------------------------------------------------------------------------


def names_of(code):
    """Names that a block binds, and names that it reads without binding them."""
    nodes = list(ast.walk(ast.parse(code)))
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    imports = [alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names]
    bound |= {(alias.asname or alias.name).partition(".")[0] for alias in imports}
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    return bound, read - bound - set(vars(builtins))


def program(page, number):
    """A block of a page, after the earlier blocks that bind the names that it reads."""
    code = blocks(page, "python", "py")
    chosen, missing = [number], names_of(code[number])[1]
    for earlier in reversed(range(number)):
        bound, read = names_of(code[earlier])
        if bound & missing:
            chosen.append(earlier)
            missing = (missing - bound) | read
    text = "\n".join(code[at] for at in sorted(chosen))
    if missing and page.name in BEFORE:
        text = BEFORE[page.name] + text
    for name, stand_in in STAND_INS.items():
        text = text.replace(name, stand_in)
    return text


BLOCKS = [(page, number) for page in PAGES for number in range(len(blocks(page, "python", "py")))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Photographs with captions, the same in Karpathy's layout, and tiny models of the kinds that have no scenes: name."""
    from hf_captionrl.apps.instruct.instructions import tiny_llama
    from hf_captionrl.scenes import load_scenes
    from hf_captionrl.utils.model_files import model_path
    from tests.tiny import write_photos
    from tests.tiny.chat import tiny_chat

    place = tmp_path_factory.mktemp("user")
    (place / "blip").symlink_to(model_path("scenes:blip-mle"))
    scenes = load_scenes(num_train=0, num_validation=0, num_test=12)["test"]
    write_photos(place / "photos", scenes)
    write_photos(place / "coco/images", scenes).unlink()
    images = [
        {
            "filename": f"{number}.png",
            "imgid": number,
            "split": "train" if number < 9 else "val",
            "sentences": [{"raw": text, "tokens": text.split()} for text in row["captions"]],
        }
        for number, row in enumerate(scenes)
    ]
    (place / "dataset_coco.json").write_text(json.dumps({"images": images}))
    for name, (model, processor) in {
        "chat": tiny_chat("idefics3"),
        "text": tiny_llama(["a red cat and a dog"], vocab_size=300, width=32, layers=1),
    }.items():
        model.save_pretrained(place / name)
        processor.save_pretrained(place / name)
    return place


@pytest.mark.parametrize(("page", "number"), BLOCKS, ids=[f"{page.stem}-{number}" for page, number in BLOCKS])
def test_documented_python_runs(page, number, folder):
    status, output = run(program(page, number), folder)
    assert status == 0, output


REAL = [(ROOT / "README.md", 0), (ROOT / "docs/metrics.md", 0), (ROOT / "docs/quickstart.md", 0)]
REWARD_IN_TRL = """
from hf_captionrl import load_scenes
from hf_captionrl.experimental.claim_rewards import ClaimReward
from trl import GRPOConfig, GRPOTrainer

rows = load_scenes(num_train=4, num_validation=0, num_test=0)["train"].select_columns(["facts"])
rows = rows.add_column("prompt", ["a cat"] * 4)
args = GRPOConfig("trl", max_steps=1, per_device_train_batch_size=4, num_generations=4, max_completion_length=4,
                  report_to="none", use_cpu=True, bf16=False, save_strategy="no")
trainer = GRPOTrainer("text", ClaimReward().as_function(), args=args, train_dataset=rows)
trainer.train()
assert any("reward" in log for log in trainer.state.log_history)
"""


@pytest.mark.parametrize("name", ["pages", "reward in TRL"])
def test_blocks_in_a_real_interpreter(name, folder):
    """The pages' blocks one after the other; each as the first of a process is above."""
    codes = [program(*block) for block in REAL] if name == "pages" else [REWARD_IN_TRL]
    code = "".join(f"exec({each!r}, {{'__name__': '__main__'}})\n" for each in codes)
    settings = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | environment(folder)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=settings | {"PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- pushes ---------------------------------------------------------------------------------------------------------

HUB = """
import contextlib, os, pathlib, sys
from tests.hub.conftest import running_hub
from tests.hub.server import WRITE
assert not [name for name in sys.modules if name.startswith("hf_captionrl")]
common = dict(max_steps=1, per_device_train_batch_size=4, use_cpu=True, report_to="none", disable_tqdm=True, bf16=False,
              push_to_hub=True, hub_model_id="tester/x", hub_token=WRITE, save_strategy="no")
with running_hub(pathlib.Path("cache")) as hub:
    import hf_captionrl
    from hf_captionrl import *
    import datasets
    from peft import LoraConfig
    train = load_captions("imagefolder", data_dir="photos", split="all")
    rows = datasets.Dataset.from_list([dict(prompt="a red cat", completion=" and a dog")] * 4)
    lora = lambda *modules, **settings: LoraConfig(target_modules=list(modules), **settings)
{make}
    trainer.train()
    address = trainer.push_to_hub()
    assert "commit" in address
    (repo,) = hub.repos.values()
    assert repo.private and any(name.endswith(".safetensors") for name in repo.files) and "README.md" in repo.files
    from hf_captionrl.cli import main
    pathlib.Path("out/README.md").unlink()
    assert main(["card", "out", "--license", "mit"]) == 0
    card = pathlib.Path("out/README.md").read_text()
    assert "license: mit" in card and f"| trainer | {type(trainer).__name__} |" in card and "| learning rate | " in card
    os.environ["HF_TOKEN"] = WRITE
    assert main(["push", "out", "--repo_id", "tester/y"]) == 0
    assert set(hub.repo("tester/y").files) == set(repo.files)
    for name, data in hub.repo("tester/y").files.items():
        assert name == "README.md" or str(pathlib.Path.cwd()).encode() not in data
"""
TRAINERS = {
    "smile": 'trainer = SmileTrainer("scenes:blip-mle", SmileConfig("out", **common), train)',
    "mle": 'trainer = SmileTrainer("scenes:clipcap-mle", SmileConfig("out", mle_weight=1.0, **common), train)',
    "caption": 'trainer = CaptionTrainer("scenes:blip-mle", CaptionConfig("out", **common), train)',
    "self_retrieval": 'trainer = SelfRetrievalTrainer("scenes:blip-mle", load_scorer("scenes:clip-reward"), '
    'SelfRetrievalConfig("out", max_completion_length=12, **common), train)',
    "sle": 'trainer = SLETrainer("scenes:blip-mle", SLEConfig("out", max_completion_length=12, num_generations=2, **common), train)',
    "caption_rl": 'trainer = CaptionRLTrainer("scenes:blip-mle", "length", '
    'CaptionRLConfig("out", max_completion_length=12, num_generations=2, **common), train)',
    "grpo": 'trainer = SelfRetrievalGRPOTrainer("chat", load_scorer("scenes:clip-reward"), '
    'SelfRetrievalGRPOConfig("out", num_generations=2, max_completion_length=4, **common), train)',
    "smile with LoRA": 'trainer = SmileTrainer("scenes:blip-mle", SmileConfig("out", **common), train, peft_config=lora("query"))',
    "grpo with LoRA": 'trainer = SelfRetrievalGRPOTrainer("chat", load_scorer("scenes:clip-reward"), peft_config=lora("q_proj"), '
    'args=SelfRetrievalGRPOConfig("out", num_generations=2, max_completion_length=4, **common), train_dataset=train)',
    "sft with LoRA": 'trainer = SmileSFTTrainer("text", SmileSFTConfig("out", **common), train_dataset=rows, '
    'peft_config=lora("q_proj", task_type="CAUSAL_LM"))',
    "sft": 'trainer = SmileSFTTrainer("text", SmileSFTConfig("out", **common), train_dataset=rows)',
}


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_pushes_and_its_folder_can_be_carded(name, folder, tmp_path):
    for entry in folder.iterdir():
        if not entry.name.startswith("out"):  # what the documented blocks wrote
            (tmp_path / entry.name).symlink_to(entry)
    code = HUB.replace("{make}", f"    {TRAINERS[name]}")
    status, output = run(code, tmp_path)
    assert status == 0, output
