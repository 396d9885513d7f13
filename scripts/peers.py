"""Runs TRL's tests of SFTTrainer and GRPOTrainer, and transformers' of Trainer, with the trainers of this package in their place.

python scripts/peers.py --trl PATH_TO_LOCAL_CLONE --output reproduction/results/peers.json
python scripts/peers.py --transformers PATH_TO_LOCAL_CLONE --output reproduction/results/peers_trainer.json

Nothing is downloaded. The data are those of TRL's own generators in the clone. The tiny models too, with a tokenizer trained
here; those with images, whose generators need the Hub, are the tiny models of this project's tests. They lie in a folder
`trl-internal-testing` beside the tests, where `from_pretrained` and `load_dataset` look before they ask the Hub.

transformers' tests, which import the package `parameterized`, train a regression with two weights, `a` and `b`. Here a tiny BLIP
is in its place, with images and captions in as many rows; `a` and `b` are the sums of all weights and of their squares.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a program, only scripts/ is on the path
import datasets
import numpy as np
import tokenizers
import torch
import transformers
import trl

from hf_captionrl.utils.io import installed_versions, read_jsonl, write_json
from tests.tiny import tiny_captioner
from tests.tiny.chat import tiny_chat

HUB = "trl-internal-testing"
# Of the models that TRL's generators name: the chat template that TRL ships, and the end token.
TEMPLATES = {
    "Qwen/Qwen2.5": ("qwen2_5", "<|im_end|>"),
    "Qwen/Qwen3": ("qwen3", "<|im_end|>"),
    "zai-org/": ("glm4moe", "<|endoftext|>"),
    "openai/gpt-oss": ("gptoss", "<|return|>"),
    "meta-llama/": ("llama3_2", "<|eot_id|>"),
    "nvidia/": ("nemotron_3_nano", "<|im_end|>"),
    "CohereLabs/tiny": ("cohere2", "<|END_OF_TURN_TOKEN|>"),
    "LiquidAI/": ("lfm2_2_5", "<|im_end|>"),
    "": (None, "<|endoftext|>"),
}
# Types of the models whose generators read their configuration from the Hub.
TYPES = {"Qwen2.5": "qwen2", "Qwen3-30B": "qwen3_moe", "Qwen3": "qwen3", "Llama": "llama", "pythia": "gpt_neox"}
# Models with images in tests/tiny/chat.py; TRL's chat templates have the same names, where there is one.
VISION = "gemma3 llava qwen2_vl qwen2_5_vl qwen3_vl".split()

SFT = """
import dataclasses
from hf_captionrl.trainers import SmileSFTConfig, SmileSFTTrainer

@dataclasses.dataclass
class SFTConfig(SmileSFTConfig):
    mle_weight: float = {weight}

class SFTTrainer(SmileSFTTrainer):
    config_class = SFTConfig
"""
GRPO = """
import datasets
import numpy as np
from PIL import Image
from hf_captionrl.rewards.base import CompletionReward
from hf_captionrl.trainers import SelfRetrievalGRPOConfig as GRPOConfig, SelfRetrievalGRPOTrainer

def stand_in(completions, **columns):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(len(set(text))) for text in texts]

class GRPOTrainer(SelfRetrievalGRPOTrainer):
    def __init__(self, model=None, reward_funcs=None, args=None, train_dataset=None, **kwargs):
        is_text = False
        if isinstance(train_dataset, datasets.Dataset):
            is_text = isinstance(train_dataset[0].get("prompt"), str)
            count = range(len(train_dataset))
            more = {"image_id": [str(i) for i in count], "captions": [["a word"] for _ in count]}
            if "image" not in train_dataset.column_names:
                more["image"] = [Image.fromarray(np.full((16, 16, 3), i * 12, np.uint8)) for i in count]
            train_dataset = datasets.concatenate_datasets([train_dataset, datasets.Dataset.from_dict(more)], axis=1)
        functions = reward_funcs if isinstance(reward_funcs, list) else [reward_funcs]
        # TRL's tests name a classifier wherever any reward would do.
        functions = [stand_in if isinstance(f, str) else f for f in functions]
        if is_text:
            functions = [CompletionReward(f, conversational=False) if callable(f) else f for f in functions]
        super().__init__(model, None, args, train_dataset, reward_funcs=functions, **kwargs)
"""
TRAINER = """
import dataclasses
import os
from pathlib import Path

import datasets
import numpy as np
import safetensors.torch
import torch
import transformers
from PIL import Image
from hf_captionrl.trainers import SmileConfig, SmileTrainer

CAPTIONER = Path(__file__).resolve().parents[2] / "captioner"
ROWS = {}

def captions_of(data):
    if isinstance(data, dict):
        return {name: captions_of(rows) for name, rows in data.items()}
    if data is None or not hasattr(data, "__len__"):
        return data
    if len(data) not in ROWS:
        count = range(len(data))
        images = [Image.fromarray(np.full((16, 16, 3), i * 3 % 256, np.uint8)) for i in count]
        captions = [["a red cat" if i % 3 else "two dogs sit"] for i in count]
        columns = {"image": images, "image_id": [str(i) for i in count], "captions": captions}
        ROWS[len(data)] = datasets.Dataset.from_dict(columns)
    return ROWS[len(data)]

class Model(transformers.BlipForConditionalGeneration):
    a = property(lambda self: torch.tensor(sum(float(p.detach().double().sum()) for p in self.parameters())))
    b = property(lambda self: torch.tensor(sum(float(p.detach().double().square().sum()) for p in self.parameters())))

    def __init__(self, config=None, **settings):
        if isinstance(config, transformers.BlipConfig):
            super().__init__(config)
        else:
            super().__init__(transformers.BlipConfig.from_pretrained(CAPTIONER))
            self.load_state_dict(safetensors.torch.load_file(CAPTIONER / "model.safetensors"), strict=False)
            self.tie_weights()

RegressionModel = RegressionDictModel = RegressionPreTrainedModel = RegressionRandomPreTrainedModel = Model
RegressionPreTrainedModelWithGradientCheckpointing = Model

@dataclasses.dataclass
class TrainingArguments(SmileConfig):
    a: float = 0.0
    b: float = 0.0
    keep_report_to: bool = False
    per_device_train_batch_size: int = 8
    num_train_epochs: float = 3.0
    learning_rate: float = 5e-5
    lr_scheduler_type: str = "linear"
    weight_decay: float = 0.0
    optim: str = "sgd"
    generation_max_new_tokens: int = 3
    generation_num_beams: int = 1

    def __post_init__(self):
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            self.metric_for_best_model = "loss"
        super().__post_init__()
        self.report_to = self.report_to if self.keep_report_to else []

RegressionTrainingArguments = TrainingArguments

class AlmostAccuracy:
    def __call__(self, prediction):
        return {"accuracy": float(np.mean([len(text) % 2 for text in prediction.predictions]))}

class Trainer(SmileTrainer):
    def __init__(self, model=None, args=None, data_collator=None, train_dataset=None, eval_dataset=None, **more):
        os.environ["HAS_TRAINER"] = "1"
        if isinstance(model, torch.nn.Module) and not isinstance(model, Model):
            model = Model()
        more = {name: value for name, value in more.items() if value is not None}
        if not isinstance(more.get("processing_class"), transformers.ProcessorMixin):
            more["processing_class"] = transformers.AutoProcessor.from_pretrained(CAPTIONER)
        more |= {"train_dataset": captions_of(train_dataset), "eval_dataset": captions_of(eval_dataset)}
        super().__init__(model, args=args, **more)

    def evaluate(self, eval_dataset=None, **more):
        return super().evaluate(captions_of(eval_dataset), **more)

    def predict(self, test_dataset, **more):
        return super().predict(captions_of(test_dataset), **more)
"""
# For the trainer of chat models with images, the most frequent text model of the tests is one with images.
SWAPS = (
    ("tiny-Qwen2ForCausalLM-2.5", "tiny-Qwen2_5_VLForConditionalGeneration"),
    ("AutoModelForCausalLM", "AutoModelForImageTextToText"),
    ("LoraConfig()", "LoraConfig(target_modules=['q_proj', 'v_proj'])"),
)
# The tests may import private names of another version of TRL.
CONFTEST = """
import importlib, json, os

def lend(module, names):
    module = importlib.import_module(module)
    for name in names:
        if not hasattr(module, name):
            setattr(module, name, lambda *args, **kwargs: False)

def pytest_runtest_logreport(report):
    if "PYTEST_XDIST_WORKER" in os.environ and (report.when == "call" or report.outcome != "passed"):
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else ""
        row = [report.nodeid, report.outcome, crash.message.strip().splitlines()[0] if crash else reason]
        row.append(bool(os.environ.pop("HAS_TRAINER", "")))
        with open("outcomes.jsonl", "a") as file:
            file.write(json.dumps(row) + "\\n")

"""
WAYS = {
    "test_sft_trainer": {"trl": "", "mle_weight 1": SFT.format(weight=1.0), "mle_weight 0": SFT.format(weight=0.0)},
    "test_grpo_trainer": {"trl": "", "functions": GRPO},
    "trainer": {"transformers": "", "SmileTrainer": TRAINER},
}
FILES = ("trainer/test_trainer.py", "trainer/test_trainer_callback.py")
# Tests of transformers' Trainer that do not apply to captioners, by reason.
NOT_APPLICABLE = {
    "numbers of the regression, or logits": "test_evaluate test_evaluate_with_batch_eval_metrics test_predict "
    "test_predict_with_batch_eval_metrics test_dynamic_shapes",
    "weights and layers of the test's model": "test_get_num_trainable_parameters test_get_optimizer_group "
    "test_no_wd_param_group test_galore_matched_modules test_gradient_checkpointing test_resume_batch_order "
    "test_resume_training_with_frozen_params",
    "the list of callbacks: ours are in it": "test_init_callback test_add_remove_callback test_event_flow",
    "evaluation leaves out no image": "test_train_and_eval_dataloaders",
    "the number of files in a folder: run.json is another": "test_save_best_checkpoint",
    "the message of an error, after equal resumed runs": "test_can_resume_training",
}
# What is refused on purpose, by a part of the message. The table in docs/other_trainers.md has the reasons.
REFUSALS = (
    "trust_remote_code|trainable weights are|which is not SMILE|has no router loss|boundaries of documents|prompt learning drops|"
    "mean_token_accuracy|IterableDataset|eval_dataset has no rewards|reads no images|is not a reward|number from the reward|"
    "is not supported here|is of another run|Training has diverged"
)


def train_tokenizer(texts: list[str], templates: Path) -> tokenizers.Tokenizer:
    """Bytes, the frequent words of TRL's texts, and the special tokens of its chat templates."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    special = {token for path in templates.glob("*.jinja") for token in re.findall(r"<\|\w+\|>", path.read_text())}
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    ordered = sorted({"<|endoftext|>", "<|return|>", *special})
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=1000, special_tokens=ordered, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_data(clone: Path, folder: Path) -> list[str]:
    """Write the data of TRL's generators, and return their texts."""
    texts: list[str] = []
    cards: dict[str, list[Any]] = {}

    def save(data: datasets.DatasetDict, repo: str, config_name: str) -> None:
        for split, rows in data.items():
            rows.to_parquet(folder / repo / config_name / f"{split}.parquet")
            written = rows.remove_columns([name for name in rows.column_names if "image" in name])
            texts.extend(str(value) for row in written for value in row.values())
        files = [{"split": split, "path": f"{config_name}/{split}.parquet"} for split in data]
        cards.setdefault(repo, []).append({"config_name": config_name, "data_files": files})
        (folder / repo / "README.md").write_text(f"---\n{json.dumps({'configs': cards[repo]})}\n---\n")

    np.random.seed(0)  # noqa: NPY002  (of the images that TRL's generators draw)
    with mock.patch.object(datasets.DatasetDict, "push_to_hub", save):
        for name in ("zen", "zen_image", "zen_multi_image", "toolcall", "harmony"):
            generate = runpy.run_path(str(clone / "scripts" / f"generate_{name}_dataset.py"))["main"]
            generate(0.1, True, f"{HUB}/{name.replace('_', '-')}")
    return texts


def make_models(clone: Path, folder: Path, backend: tokenizers.Tokenizer, templates: Path) -> dict[str, str]:
    """Write the models of TRL's generators and those with images; return the errors of generators that failed."""
    faults = {}

    def tokenizer_of(name: str, **_: Any) -> Any:
        template, end = next(found for prefix, found in TEMPLATES.items() if name.startswith(prefix))
        text = template and (templates / f"{template}.jinja").read_text()
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=end, pad_token="<|endoftext|>", chat_template=text
        )

    def config_of(name: str, **settings: Any) -> Any:
        kind = next(kind for part, kind in TYPES.items() if part in name)
        return transformers.AutoConfig.for_model(kind, vocab_size=backend.get_vocab_size(), **settings)

    def save(model: Any, processor: Any, generation: Any, prefix: str = "tiny", suffix: str | None = None) -> None:
        place = folder / HUB / "-".join(filter(None, (prefix, type(model).__name__, suffix)))
        ids = {"eos_token_id": processor.eos_token_id, "pad_token_id": processor.pad_token_id}
        for name, value in ids.items():
            setattr(model.config.get_text_config(), name, value)
        model.generation_config = transformers.GenerationConfig(**ids)
        for part in (model, processor):
            part.save_pretrained(place)

    package = types.ModuleType("tiny_models")
    package.__path__ = [str(clone / "scripts" / "generate_tiny_models")]
    sys.modules["tiny_models"] = package
    common = importlib.import_module("tiny_models._common")
    for name in ("check_transformers_version", "check_dtype_pattern", "print_config_diff", "smoke_test"):
        setattr(common, name, lambda *args, **kwargs: None)
    vars(common)["push_to_hub"] = save
    with (
        mock.patch.object(transformers.AutoTokenizer, "from_pretrained", tokenizer_of),
        mock.patch.object(transformers.AutoConfig, "from_pretrained", config_of),
        mock.patch.object(transformers.GenerationConfig, "from_pretrained", return_value=None),
    ):
        for path in sorted(clone.glob("scripts/generate_tiny_models/for_[cs]*_[lc]*/[!ps]*_for_*.py")):
            torch.manual_seed(0)
            try:
                importlib.import_module(f"tiny_models.{path.parent.name}.{path.stem}")
            except Exception as error:
                faults[path.stem] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for kind in VISION:
        model, processor = tiny_chat(kind)
        if (path := templates / f"{kind}.jinja").exists():
            processor.chat_template = path.read_text()
        for part in (model, processor):
            part.save_pretrained(folder / HUB / f"tiny-{type(model).__name__}")
    return faults


def stage_transformers(tests: Path, clone: Path, suite: str, code: str) -> None:
    """Copy transformers' tests of the Trainer, with the code in place of their trainer, arguments and models."""
    shutil.copytree(clone / "tests" / suite, tests / suite)
    (tests / "conftest.py").write_text(CONFTEST)
    for path in [tests / file for file in FILES]:
        text = re.sub(r"^\s+(Glue|LineBy)\w+,\n", "", path.read_text(), flags=re.M)  # no longer in transformers
        if code:
            (path.parent / "ours.py").write_text(code)
            text = re.sub(r"^\s+(Trainer|TrainingArguments),\n", "", text, flags=re.M)
            text = re.sub("^import", "from .ours import Trainer, TrainingArguments\nimport", text, count=1, flags=re.M)
            text = text.replace("    def get_regression", "    from .ours import *\n\n    def get_regression", 1)
            text = text.replace('"training_args.bin", ', "")  # a pickle, which no trainer here saves
            text = text.replace(
                "trainer.model_accepts_loss_kwargs = False", ""
            )  # ours divide by the tokens of the step
        path.write_text(text)


def stage_trl(tests: Path, clone: Path, suite: str, code: str) -> None:
    """Copy a suite of TRL, with the code in place of its trainer."""
    shutil.copytree(clone / "tests", tests, ignore=shutil.ignore_patterns("test_*", "experimental", "distributed"))
    text = (clone / "tests" / f"{suite}.py").read_text()
    imports = re.findall(
        r"^from (trl\.\S+) import \(?([\w\s,]+)", text + (tests / "testing_utils.py").read_text(), re.M
    )
    conftest = (tests / "conftest.py").read_text()
    # As here on a CPU: in bf16, many of the tests' small updates vanish.
    conftest = conftest.replace("self.use_cpu = True", "self.use_cpu, self.bf16 = True, bool(self.bf16)") + CONFTEST
    conftest += "".join(f"lend({module!r}, {names.replace(',', ' ').split()})\n" for module, names in imports)
    (tests / "conftest.py").write_text(conftest)
    if code:
        (tests / "ours.py").write_text(code)
        text = re.sub(r"^from trl import (\w+Config, \w+Trainer)$", r"from .ours import \1", text, flags=re.M)
    for old, new in SWAPS if code == GRPO else ():
        text = text.replace(old, new)
    (tests / f"{suite}.py").write_text(text)


def run(folder: Path, options: Sequence[str]) -> dict[str, tuple[str, str, bool]]:
    """Of each test the outcome, the first line of the error or the reason of a skip, and whether it made one of our trainers."""
    outcomes = folder / "outcomes.jsonl"
    outcomes.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-m", "not slow", "--timeout=600", *options]
    offline = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(command, cwd=folder, env={**os.environ, **offline}, check=False)
    return {test: (outcome, error, made) for _, (test, outcome, error, made) in read_jsonl(outcomes)}


def kind_of(test: str, error: str) -> dict[str, str]:
    """Whether a test fails by a refusal or does not apply, with the reason, or is a fault."""
    if re.search(REFUSALS, error):
        return {"kind": "refusal"}
    name = test.rpartition("::")[2]
    reasons = [reason for reason, tests in NOT_APPLICABLE.items() if name in tests.split()]
    return {"kind": "not applicable", "reason": reasons[0]} if reasons else {"kind": "fault"}


def main(argv: Sequence[str] | None = None) -> None:
    """Make the stand-ins, run every suite in every way, and compare with TRL's own classes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peer = parser.add_mutually_exclusive_group(required=True)
    peer.add_argument("--trl", type=Path, metavar="CLONE")
    peer.add_argument("--transformers", type=Path, metavar="CLONE")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    parser.add_argument("-k", dest="select", help="run only these tests, as pytest's -k")
    arguments = parser.parse_args(argv)
    is_trl = arguments.trl is not None
    clone = (arguments.trl or arguments.transformers).resolve()
    version = (clone / "VERSION" if is_trl else clone / "src/transformers/__init__.py").read_text()
    command = [str(shutil.which("git")), "-C", str(clone), "log", "-1", "--format=%H %cs"]
    commit = subprocess.check_output(command, text=True).split()
    result: dict[str, Any] = {
        "command": f"python scripts/peers.py --{'trl' if is_trl else 'transformers'} CLONE --output {arguments.output}",
        "versions": installed_versions(),
        "tests_of": {
            "version": re.findall(r"^\d\S+|(?<=__version__ = \").+(?=\")", version)[0],
            "commit": commit[0],
            "date": commit[1],
        },
        "select": arguments.select,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if is_trl:
            templates = Path(trl.__file__).parent / "chat_templates"
            backend = train_tokenizer(make_data(clone, folder), templates)
            result["without_stand_in"] = make_models(clone, folder, backend, templates)
        else:
            tiny_captioner("blip").save_pretrained(folder / "captioner")
        result["counts"], result["rows"] = {}, []
        for suite, ways in ((suite, ways) for suite, ways in WAYS.items() if is_trl == ("trl" in ways)):
            options = [f"tests/{file}" for file in ([f"{suite}.py"] if is_trl else FILES)]
            options += ["-k", arguments.select] if arguments.select else []
            for way, code in ways.items():
                print(f"--- {suite}, {way}", flush=True)
                shutil.rmtree(folder / "tests", ignore_errors=True)
                (stage_trl if is_trl else stage_transformers)(folder / "tests", clone, suite, code)
                tests = run(folder, options)
                result["counts"][f"{suite}, {way}"] = dict(Counter(outcome for outcome, _, _ in tests.values()))
                if not code:  # the others run what these stand-ins suffice for
                    result["skipped"] = dict(
                        Counter(text for outcome, text, _ in tests.values() if outcome == "skipped")
                    )
                    result["failed"] = sorted(test for test, (outcome, _, _) in tests.items() if outcome == "failed")
                    options = [test for test, (outcome, _, _) in tests.items() if outcome == "passed"]
                    for old, new in SWAPS if suite == "test_grpo_trainer" else ():
                        options = [test.replace(old, new) for test in options]  # names of models are in names of tests
                    continue
                made = Counter(
                    "trainer" if made else "no trainer" for outcome, _, made in tests.values() if outcome == "passed"
                )
                result["counts"][f"{suite}, {way}"] |= {f"passed with {name}": number for name, number in made.items()}
                for test, (outcome, error, _) in tests.items():
                    if outcome != "passed":
                        error = error.replace(tempfile.gettempdir() + os.sep, "")
                        result["rows"].append({"way": way, "test": test, **kind_of(test, error), "error": error})
                result["counts"][f"{suite}, {way}"] |= Counter(
                    row["kind"] for row in result["rows"] if row["way"] == way
                )
    write_json(arguments.output, result)


if __name__ == "__main__":
    main()
