"""Record what the package does, so that a refactoring can be shown to keep it: one core, no network, fixed seeds.

    python scripts/freeze.py --output before.json
    python scripts/freeze.py --output after.json --lines_of before.json   # and the command lines documented before
    python scripts/freeze.py --compare before.json after.json

Every item runs in a process forked from this one, in its own folder; a failure is recorded as the type of its exception.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import os
import re
import runpy
import shlex
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# fmt: off
TINY = {"tiny_model": "blip git vit-gpt2 vit-bert clipcap",
        "tiny_family": "blip2-opt blip2-t5 instructblip-llama instructblip-t5 florence2 kosmos2 pix2struct",
        "tiny_chat": "llava llava_onevision idefics3 smolvlm paligemma qwen2_vl qwen2_5_vl qwen3_vl internvl gemma3"}
FAMILIES = {name: function for function, names in TINY.items() for name in names.split()}
TILED = "llava_onevision idefics3 smolvlm qwen2_vl qwen2_5_vl qwen3_vl internvl".split()
VOLATILE = re.compile(r"runtime|per_second|_time$|seconds|versions?$|^date|created|memory|hostname|platform|^(ms|pid|commit)$")
PATTERNS = {r"\d{4}-\d\d-\d\d([T ][\d:.+Z]+)?": "<date>", r"\b[\d.]+ (ms|s|min|seconds?|minutes?|hours?|GiB)\b": "<t>",
            r"\b\d+\.\d+\.\d+([.+]\w+)*\b": "<version>", r"\bseconds [\d.]+": "<t>", r" at 0x[0-9a-f]+": ""}
OMITTED = re.compile(r"(^|/)checkpoint-|(^|/)\.|\.lock$|cache|\.bin$|\.pt$|tfevents|\.shards/|^photos/.*png|^winoground")

TRAINING = {"max_steps": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "use_cpu": True, "bf16": False,
            "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "report_to": "none", "guard": "off",
            "freeze_vision_tower": True, "max_completion_length": 8, "generation_max_new_tokens": 8, "eval_steps": 3,
            "gradient_checkpointing": False, "max_length": 64}
TRAINERS = [f"{method} {name}" for method in ("Smile", "SelfRetrieval", "SLE", "CaptionRL") for name in FAMILIES]
TRAINERS += """
Caption scenes:blip-mle
Smile scenes:blip-mle eval_strategy="steps"
Smile scenes:blip-mle mle_weight=0.1 first_token="shift" gradient_accumulation_steps=2
Smile scenes:blip-mle peft="both" freeze_vision_tower=false
Smile scenes:blip-mle stream=true freeze_vision_tower=false
SelfRetrieval scenes:blip-mle eval_strategy="steps"
SelfRetrieval scenes:blip-mle num_generations=2 baseline="leave_one_out" do_sample=true cider_weight=0.5 beta=0.1
SelfRetrieval scenes:blip-mle bag_schedule={"1":2}
SelfRetrieval scenes:blip-mle peft="language" guard="stop"
SLE scenes:blip-mle num_generations=3 entropy_weight=0.03 eval_strategy="steps"
SLE scenes:blip-mle num_generations=3 alpha=0.3 rl_start_epoch=1
CaptionRL scenes:blip-mle num_generations=2 do_sample=true
SmileSFT llama
SmileSFT llama subset_scope="sentence" mle_weight=0.1
SmileSFT llama subset_scope="window" window_tokens=16 peft="q_proj"
SelfRetrievalGRPO llava num_generations=2
SelfRetrievalGRPO llava cider_weight=0.5 num_generations=4
""".strip().splitlines()

SMALL = """--max_train_images 16 --max_eval_images 8 --max_test_images 105 --max_steps 2 --per_device_train_batch_size 8
    --use_cpu --disable_tqdm true --gallery_size 4 --logging_steps 1 --per_device_eval_batch_size 64
    --generation_max_new_tokens 10 --generation_num_beams 2 --eval_steps 2 --save_steps 2 """
STEPS = SMALL + "--eval_strategy steps --save_strategy steps "
RECIPES = {
    "smile_blip": SMALL,
    "mle_clipcap": SMALL + "--warmup_steps 1",
    "self_retrieval_blip": STEPS + """--max_completion_length 8 --bag_schedule '{"1":2}' --num_neighbours 8""",
    "self_retrieval_clipcap": STEPS + "--max_completion_length 8 --num_neighbours 8",
    "sle_blip": STEPS + "--max_completion_length 8 --num_generations 3 --num_samples 2 --sample_images 2 --sample_temperatures 0.5",
    "smile_video": STEPS,
    "smile_llama_lora": "--max_train_rows 16 --pretrain_epochs 1 --answer_max_new_tokens 6 --max_steps 2 --disable_tqdm true",
}
METHODS = {"self-retrieval-clipcap": "self_retrieval_clipcap", "mle-clipcap": "mle_clipcap",
           "smile-video": "smile_video", "smile-text": "smile_llama_lora"}  # the others end in _blip

COMMANDS = """
caption scenes:blip-mle --max_images 20 --max_new_tokens 8 --output a.jsonl
caption scenes:blip-smile --max_images 20 --max_new_tokens 8 --num_beams 1 --num_return_sequences 2 --do_sample --output b.jsonl
caption scenes:blip-sr --dataset imagefolder --data_dir photos --max_new_tokens 8 --output c.jsonl --json
caption scenes:blip-mle --max_images 20 --max_new_tokens 8 --output shards --processes 2
features --max_images 20 --output features
pixels --model scenes:blip-mle --max_images 20 --output pixels
bags --max_images 20 --bag_sizes 3 --output bags.parquet
bags --max_images 20 --mode neighbours --output neighbours.safetensors
album photos --model scenes:blip-mle --scorer scenes:clip-reward --max_new_tokens 8 --output album.csv album.html album.jsonl
album photos --captions c.jsonl --scorer scenes:clip-reward --output diagnosis.html diagnosis.csv
album photos --model scenes:blip-mle --scorer scenes:clip-reward --max_new_tokens 8 --sidecars --trigger ohwx --output words.csv --json
evaluate --captions a.jsonl b.jsonl --max_images 20 --suite all --output_dir evaluated
evaluate --captions a.jsonl --max_images 20 --suite smile --language_model none --output_dir evaluated-json --json
evaluate --captions shards --max_images 20 --suite ndlb --output_dir evaluated-shards
benchmark winoground --data_dir winoground --scorer scenes:clip-reward
explain scenes:blip-mle scenes:test-00012 --caption "two pigs" --distractors scenes:bag --output_dir explained
gallery --captions a.jsonl b.jsonl --max_images 20 --output_dir gallery
truematch build --output truematch --max_images 20 --bag_sizes 3
truematch review truematch --export review.html
truematch apply truematch
truematch evaluate truematch --captions a.jsonl --max_images 20 --output_dir judged
truematch leaderboard truematch judged/results.json
study build retrieval --captions a.jsonl b.jsonl --max_images 20 --output study --set_size 2 --num_sets 3 --controls 0
study build rating --captions a.jsonl b.jsonl --max_images 20 --output ratings --num_images 2 --num_raters 1
study score ratings answers.json
boost --max_images 20 --output boosted
card boosted --license mit
push boosted --dry_run
convert old.bin new.safetensors
metrics install
metrics path self_retrieval
completion bash
doctor --json
train smile-text --output_dir text --max_train_rows 16 --pretrain_epochs 1 --answer_max_new_tokens 6 --max_steps 2 --disable_tqdm true
train --json mle-clipcap --output_dir trained --perplexity_name_or_path none --warmup_steps 1
card trained/model --check
push trained/model --dry_run
caption nowhere
caption scenes:blip-mle --max_imagse 3
evaluate --captions gone.jsonl
""".strip().replace("--warmup_steps 1", " ".join((SMALL + "--warmup_steps 1").split())).splitlines()

METRICS = """
self_retrieval predictions=T, references=I, scorer="scenes:siglip-held-out"
self_retrieval predictions=T, references=[0, 1, 2, 3, 4, 5], text_features=F, image_features=F[::-1], bags=[[0, 1, 2]], ks=[1, 3]
self_retrieval predictions=T, text_features=F, image_features=F[::-1], num_distractors=2, protocol="sampled", repeats=2
caption_diversity predictions=T, image_ids=[0, 0, 0, 1, 1, 1]
caption_diversity predictions=[T[:3], T[3:]]
caption_faithfulness predictions=T, references=facts
caption_nlg predictions=T, references=R
caption_nlg predictions=T, references=R, which=["meteor"]
caption_perplexity predictions=T, model="scenes:gpt2-perplexity"
clip_score predictions=T, references=I, scorer="scenes:siglip-held-out", prefix=""
clip_score predictions=T, references=F, text_features=F[::-1], preset="ndlb"
emscore predictions=T, references=[I[:2]] * 6, scorer="scenes:clip-reward"
emscore predictions=T[:1], references=[[[1.0, 0.0], [0.0, 1.0]]], token_features=[[[1.0, 0.0], [0.6, 0.8]]]
""".strip().splitlines()

N, PARTS = range(12), ("train", "val", "test")
TEXTS = [[f"caption {k} of  {n}" for k in "ab"] for n in N]
ROWS = [{"file_name": f"{n}.png", "captions": TEXTS[n], "nr": n} for n in N]
ONE = [{"image": f"{n}.png", "caption": TEXTS[n][0], "nr": 7 * n} for n in N]
CSV = "image,caption,caption,nr\n" + "".join(f'{n}.png,"{a}, yes",{b},{n}\n' for n, (a, b) in enumerate(TEXTS))
FLICKR = [{"filename": f"{n}.png", "imgid": n, "split": ("restval", *PARTS)[n % 4], "sentences": [{"raw": t} for t in TEXTS[n]]} for n in N]
NOCAPS = {"images": [{"id": n, "file_name": f"{n}.png", "domain": ["in-domain", "near-domain", "out-domain"][n % 3]} for n in N],
          "annotations": [{"image_id": n % 12, "caption": f"text {n}"} for n in range(24)]}
CONCADIA = [{"filename": f"{n}.png", "split": PARTS[n % 3]} | {k: {"raw": f"{k} {n}"} for k in ("caption", "description", "context")} for n in N]
VIDEOS = {"videos": [{"video_id": f"video{n}", "split": ("train", "validate", "test")[n % 3]} for n in N],
          "sentences": [{"video_id": f"video{n % 12}", "caption": f"text {n}"} for n in range(24)]}
GIFS = [f"https://media.example/{n:x}/t{n}.gif" for n in N]
TGIF = {"tgif-v1.0.tsv": "".join(f"{GIFS[n]}\t{t}\n" for n in N for t in TEXTS[n])}
TGIF |= {f"splits/{part}.txt": "\n".join(GIFS[k::3]) for k, part in enumerate(PARTS)}
SOURCES = """
{"p/metadata.jsonl": ROWS} | "imagefolder", data_dir="p"
{"p/metadata.jsonl": ROWS} | "p", split_fractions=(1, 0, 0)
{"p/metadata.jsonl": ROWS} | "p", split_fractions=(0.5, 0.25, 0.25), seed=4, image_id_column="nr"
{"p/metadata.csv": CSV.replace("image", "file_name", 1)} | "p"
{"p/metadata.parquet": ROWS} | "p"
{f"q/{part}/metadata.jsonl": [{"file_name": "0.png", "text": part}] for part in PARTS} | "q"
{"dataset_coco.json": {"images": [r | {"filepath": "p", "cocoid": 9 - r["imgid"]} for r in FLICKR]}} | "dataset_coco.json", image_root="."
{"dataset_flickr30k.json": {"images": FLICKR}} | "dataset_flickr30k.json", image_root="p"
{"rows.csv": CSV} | "rows.csv", image_root="p"
{"p/rows.jsonl": ONE} | "p/rows.jsonl", image_id_column="nr"
{"p/rows.json": ONE} | "p/rows.json"
{"p/rows.parquet": ONE} | "p/rows.parquet"
{"nocaps_val_4500_captions.json": NOCAPS} | "nocaps", data_dir=".", image_root="p"
{"wiki_split.json": {"images": CONCADIA}} | "concadia", data_dir=".", image_root="p"
{"wiki_split.json": {"images": CONCADIA}} | "concadia", data_dir=".", image_root="p", caption_column="description"
{"valid_data.json": {"set_1": {"5": "a deer", "0": "a bird"}, "video-shot1_0": {"9": "two girls"}}} | "imagecode", data_dir="."
TGIF | "tgif", data_dir=".", num_frames=2
{"videodatainfo.json": VIDEOS} | "msr-vtt", data_dir=".", num_frames=2
{} | "p", require_captions=False
{} | datasets.Dataset.from_list(ONE), image_root="p"
{} | "scenes"
{} | "scenes", caption_column="full_caption"
{} | "scenes", dataset_config="alt_text"
{} | "scenes", dataset_config="shapes"
{} | "moving_scenes", num_frames=2
""".strip().splitlines()
# fmt: on


def sha(data):
    return hashlib.sha256(data if isinstance(data, bytes) else json.dumps(data).encode()).hexdigest()[:16]


def normal(value):
    """JSON without what differs between two equal runs."""
    if isinstance(value, dict):
        return {
            normal(str(k)): normal(v) if isinstance(v, bool | None) or not VOLATILE.search(str(k)) else "<volatile>"
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [normal(v) for v in value]
    if isinstance(value, bool | int | float) or value is None:
        return value
    if hasattr(value, "tolist"):
        return normal(value.tolist())
    text = str(getattr(value, "value", value)).replace(os.environ["FREEZE"], "<tmp>").replace(str(ROOT), "<root>")
    for pattern, replacement in PATTERNS.items():
        text = re.sub(pattern, replacement, text)
    return text


def flat(value, path=""):
    """Leaves by path."""
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for k, v in pairs for key, leaf in flat(v, f"{path}/{k}").items()}
    return {path: value}


def digest(tensors):
    import torch

    named = [(n, t.detach().contiguous()) for n, t in sorted(dict(tensors).items())]
    parts = [f"{n}{t.dtype}{[*t.shape]}".encode() + bytes(t.view(-1).view(torch.uint8).numpy()) for n, t in named]
    return f"{len(named)} tensors {sha(b''.join(parts))}"


def content(path):
    """The content of a small text, else its digest; of tensors and tables without their metadata."""
    if path.suffix == ".safetensors":
        return digest(importlib.import_module("safetensors.torch").load_file(path))
    if path.suffix == ".parquet":
        table = importlib.import_module("pyarrow.parquet").read_table(path)
        return {"columns": [f"{f.name}: {f.type}" for f in table.schema], "rows": sha(normal(table.to_pylist()))}
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        return sha(path.read_bytes())
    if path.suffix == ".json":
        found = normal(json.loads(text))
    else:
        found = [normal(json.loads(line) if path.suffix == ".jsonl" else line) for line in text.splitlines()]
    return (
        found
        if len(flat(found)) < 2000 and not re.search("tokenizer|vocab", path.name) and path.suffix != ".html"
        else sha(found)
    )


def files(folder="."):
    found = {str(path.relative_to(folder)): path for path in sorted(Path(folder).rglob("*")) if path.is_file()}
    return {name: attempt(content, path) for name, path in found.items() if not OMITTED.search(name)}


def put(path, value):
    """Write a file of the kind that its name says; a number is a picture of that size and colour."""
    import datasets
    from PIL import Image

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(value, int):
        frames = [Image.new("RGB", (16 + value, 16), (20 * value, 40 * k, 0)) for k in range(3)]
        moving = {"format": "GIF", "save_all": True, "append_images": frames[1:], "duration": 100}
        frames[0].save(path, **(moving if path.suffix in (".gif", ".mp4") else {}))
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(value).to_parquet(path)
    elif isinstance(value, str):
        path.write_text(value)
    else:
        path.write_text("\n".join(map(json.dumps, value)) if path.suffix == ".jsonl" else json.dumps(value))


def attempt(function, *arguments):
    try:
        return function(*arguments)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        return f"<{type(error).__name__}>"


def forked(name, folder, function, *arguments):
    """What a function returns and prints, run in a process of its own."""
    folder = Path(os.environ["FREEZE"], folder or sha(name))
    folder.mkdir(exist_ok=True)
    start, answer = time.time(), Path(os.environ["FREEZE"], sha([name, str(function)]) + ".json")
    if not (child := os.fork()):
        os.chdir(folder)
        os.dup2(os.open(answer.with_suffix(".stdout"), os.O_RDWR | os.O_CREAT), 1)
        found = attempt(function, *arguments)
        sys.stdout.flush()
        answer.write_text(json.dumps(normal(found), sort_keys=True))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(f"{time.time() - start:6.1f} s  {name}", file=sys.stderr)
    found = json.loads(answer.read_text()) if answer.exists() else f"<ended with {status}>"
    said = answer.with_suffix(".stdout").read_text()
    with contextlib.suppress(ValueError):
        said = json.loads(said)
    return found, normal(said)


def tiny(name):
    from hf_captionrl import load_captioner
    from tests import tiny
    from tests.tiny import chat, families

    homes = {"tiny_model": tiny, "tiny_family": families, "tiny_chat": chat}
    if name not in FAMILIES:
        return load_captioner(name)
    model, processor = getattr(homes[FAMILIES[name]], FAMILIES[name])(name)
    return load_captioner(model, processor=processor)


def train(line):
    """Log, gradients of each step and weights of a trainer; the line: trainer, model, settings."""
    import datasets
    import torch
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    import hf_captionrl as ours
    from tests.tiny.chat import chat_tokenizer, tiny_chat

    method, name, *pairs = line.split()
    settings = {key: json.loads(value) for key, value in (pair.split("=") for pair in pairs)}
    peft, stream = settings.pop("peft", None), settings.pop("stream", False)
    config = getattr(ours, f"{method}Config")
    settings = {k: v for k, v in TRAINING.items() if k in config.__dataclass_fields__} | settings
    if "cache_image_features" in config.__dataclass_fields__:
        settings["cache_image_features"] = name not in TILED and settings["freeze_vision_tower"]
    scenes = ours.load_scenes(num_train=16, num_validation=12, num_test=0)
    given = {"train_dataset": scenes["train"], "args": config("out", **settings)}
    torch.manual_seed(0)
    if method == "SmileSFT":
        tokenizer = given["processing_class"] = chat_tokenizer(())
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        model = LlamaForCausalLM(LlamaConfig(**sizes))
        says = "One red cat. It is {0}. The dog is blue! A cat again."
        rows = [{"prompt": f"Say {n}: ", "completion": says.format(n)} for n in "abcdefgh"]
        given["train_dataset"] = datasets.Dataset.from_list(rows)
    elif method == "SelfRetrievalGRPO":
        model, given["processing_class"] = tiny_chat(name)
    else:
        model, given["eval_dataset"] = tiny(name), scenes["validation"]
    if method.startswith("SelfRetrieval"):
        given["scorer"] = ours.load_scorer("scenes:clip-reward")
    if method == "SelfRetrieval":
        given["held_out_scorer"] = ours.load_scorer("scenes:siglip-held-out")
    if method == "CaptionRL":
        given["reward_funcs"] = [lambda completions: [1.0 + len(caption) % 3 for caption in completions]]
    if peft:
        preset = {"language": ours.language_lora, "both": ours.both_lora}
        given["peft_config"] = preset[peft](model, r=4) if peft in preset else LoraConfig(r=4, target_modules=[peft])
    if stream:
        given["train_dataset"] = given["train_dataset"].to_iterable_dataset(num_shards=2)
    if "bag_schedule" in settings:
        given["neighbours"] = (torch.arange(16)[:, None] + torch.arange(1, 9)) % 16
    steps = []

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            steps.append(digest((n, p.grad) for n, p in model.named_parameters() if p.grad is not None))

    trainer = getattr(ours, f"{method}Trainer")(model, callbacks=[Gradients()], **given)
    trainer.train()
    weights = digest(trainer.model.named_parameters())
    return {"gradients": steps, "log": trainer.state.log_history, "weights": weights}


def save(name):
    """Files of a saved captioner, and what a captioner read from them writes."""
    import torch

    from hf_captionrl import load_captioner, load_scenes

    tiny(name).save_pretrained("saved")
    captioner = load_captioner("saved")
    images = [row["image"].convert("RGB") for row in load_scenes(num_train=0, num_validation=0, num_test=3)["test"]]
    encoded = captioner.encode_images(images)
    found = {"files": files("saved"), "class": type(captioner).__name__}
    for how in (
        {"num_beams": 1},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2, "temperature": 0.7},
    ):
        torch.manual_seed(0)
        found[f"captions {how}"] = captioner.generate(**encoded, max_new_tokens=6, **how).captions
    batch = captioner.collate(images, ["a red cat", "two small birds near the tree", "a dog"])
    return found | {"log_probs": torch.as_tensor(captioner.log_probs(batch)).detach()}


def recipe(name):
    words = ["--output_dir", "out", "--seed", "3", *shlex.split(RECIPES[name])]
    sys.argv = [f"{name}.py", *words]
    importlib.import_module(f"recipes.{name}").main(words)
    return files("out")


def world():
    """What the commands read: 20 scenes as a folder, one pair of Winoground, an old checkpoint."""
    import torch

    from hf_captionrl import load_scenes

    scenes = load_scenes(num_train=0, num_validation=0, num_test=20)["test"]
    put("photos/metadata.jsonl", [{"file_name": f"{n}.png", "captions": c} for n, c in enumerate(scenes["captions"])])
    pair = {"image_0": "ex_0", "image_1": "ex_1", "caption_0": "a pig", "caption_1": "a tree"}
    put("winoground/examples.jsonl", [pair])
    Path("winoground/images").mkdir()
    for n, image in enumerate(scenes["image"]):
        image.save(f"photos/{n}.png")
        image.save(f"winoground/images/ex_{n}.png")
    torch.save({"weight": torch.ones(2)}, "old.bin")


def command(line):
    """The exit code of a command."""
    if line.startswith("study score"):
        from hf_captionrl.apps.studies.build import ANSWERS_FORMAT, answers_checksum, read_key

        key, time_ = read_key(Path("ratings")), "2026-01-02T03:04:05.678Z"
        answers = [{"question": q["id"], "values": [3, 4, 5], "ms": 9} for q in key["parts"]["rater-1"]]
        value = {"format": ANSWERS_FORMAT, "study": key["fingerprint"], "part": "rater-1", "participant": "p"}
        value |= {"started": time_, "exported": time_, "answers": answers}
        put("answers.json", value | {"checksum": answers_checksum(value)})
    sys.argv = ["captionrl", *shlex.split(line)]
    try:
        runpy.run_module("hf_captionrl.cli", run_name="__main__")
    except SystemExit as stop:
        return stop.code


def measure(line):
    import evaluate

    from hf_captionrl import load_scenes

    name, arguments = line.split(" ", 1)
    rows = load_scenes(num_train=0, num_validation=0, num_test=6)["test"]
    given = {"T": [c[0] for c in rows["captions"]], "R": [c[1:] for c in rows["captions"]], "I": list(rows["image"])}
    given |= {"F": [[n / 10, 1 - n / 10, 0.3] for n in range(6)], "facts": list(rows["facts"])}
    return evaluate.load(name).compute(**eval(f"dict({arguments})", given))  # our own tables # nosec B307


def draw(make):
    """What a trainer is given in the second epoch."""
    items = make()
    items.set_epoch(1)
    return [[item["image_id"], item["caption"]] for item in items]


def source(line):
    """Rows of every split of a data set, and the epochs that a trainer draws from its first split."""
    import datasets

    from hf_captionrl.data import (
        CaptionDataset,
        StreamedCaptions,
        check_captions,
        is_video,
        load_caption_splits,
        open_image,
        sample_frames,
    )

    for n in N:
        for path in (f"p/{n}.png", f"q/{PARTS[n % 3]}/0.png", f"gifs/t{n}.gif", f"videos/video{n}.mp4"):
            put(path, n)
        for folder in ("set_1", "video-shot1_0") if n < 10 else ():
            put(f"image-sets/{folder}/img{n}.jpg", n)
    written, arguments = line.rsplit(" | ", 1)
    names = globals() | {"datasets": datasets}
    for path, value in eval(written, names).items():  # our own tables # nosec B307
        put(path, value)
    names |= {"load_caption_splits": load_caption_splits}
    found, splits = {}, eval(f"load_caption_splits({arguments})", names)  # our own tables # nosec B307
    for split, rows in splits.items():
        sizes = [
            [frame.size for frame in sample_frames(v, 2)] if is_video(v) else open_image(v).size
            for v in rows.select(range(min(len(rows), 30)))["image"]
        ]
        texts = list(zip(rows["image_id"], rows["captions"], strict=True)) if "captions" in rows.column_names else None
        found[split] = {"columns": rows.column_names, "sizes": sizes, "number": len(rows)}
        found[split]["rows"] = texts if len(rows) < 30 else sha(normal(texts))
    if len(rows := next(iter(splits.values()))) < 30:
        found["quarantined"] = attempt(lambda: check_captions(splits)[1].counts())
        streamed = functools.partial(StreamedCaptions, rows.to_iterable_dataset(1))
        for name, make in (("whole", functools.partial(CaptionDataset, rows)), ("stream", streamed)):
            found[f"drawn in epoch 1, {name}"] = attempt(draw, make)
    return found


def documented():
    """Command lines in shell blocks and code spans, a continued line in one piece, and every preset of the recipes."""
    from hf_captionrl.apps.experiments.arguments import load_row, row_names

    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text().replace("\\\n", " ")
        blocks = re.findall(r"^ *```(?:bash|sh)\n(.*?)^ *```", text, re.M | re.S)
        for line in [*"\n".join(blocks).splitlines(), *re.findall(r"`([^`\n]+)`", text)]:
            for part in re.split(r" && |\|", line):
                part = " ".join(re.split(r" +#| >|<br>", part)[0].split())
                if re.match(r"captionrl \w+ ?|(python|accelerate launch) .*recipes/\w+\.py", part):
                    yield part
    configs = ROOT / "recipes" / "configs"
    yield from (f"python recipes/{name}.py" for name in RECIPES)
    yield from (f"python recipes/{load_row(configs, row).recipe}.py --row {row}" for row in row_names(configs))
    yield from (f"python recipes/{f.parent.name}.py --config {f.name}" for f in sorted(configs.glob("[!r]*/*.yaml")))


def parse_recipe(name, words):
    words = list(words)
    for n in range(1, len(words)):
        if words[n - 1] == "--config" and "/" not in words[n]:
            words[n] = f"recipes/configs/{name}/{words[n]}"
    parsed = importlib.import_module(f"recipes.{name}").parse_args(words)
    return {k: v for part in parsed for k, v in dataclasses.asdict(part).items()}


def parse(line):
    """Values of a command line, which is not run; of a recipe those that differ from the recipe without arguments."""
    from hf_captionrl.cli.main import build_parser

    os.chdir(ROOT)
    words, found = shlex.split(line, comments=True), {}
    if words[0] == "captionrl":
        found = vars(build_parser().parse_args(words[1:]))
        found = {k: v for k, v in found.items() if k not in ("run", "is_resumable")}
        if found.get("command") != "train":
            return found
        words = [f"recipes/{METHODS.get(found['method'], found['method'].replace('-', '_') + '_blip')}.py"]
        words += found["arguments"]
    at = next(n for n, word in enumerate(words) if re.fullmatch(r"recipes/\w+\.py", word))
    name = Path(words[at]).stem
    usual = parse_recipe(name, []) if words[at + 1 :] else {}
    values = parse_recipe(name, words[at + 1 :])
    return found | {k: v for k, v in values.items() if k not in usual or usual[k] != v}


SECTIONS = {
    "trainers": (TRAINERS, train),
    "recipes": (RECIPES, recipe),
    "commands": (COMMANDS, command),
    "metrics": (METRICS, measure),
    "documented": ((), parse),
    "data": (SOURCES, source),
    "saved": (["scenes:blip-mle", *FAMILIES], save),
}


def record(options):
    """Every item of the chosen sections."""
    for name in ("datasets", "evaluate", "peft", "trl", "transformers", *(f"recipes.{name}" for name in RECIPES)):
        importlib.import_module(name)
    result: dict[str, dict[str, object]] = {}
    for section in options.only:
        items, function = SECTIONS[section]
        together = "commands" if section == "commands" else None
        if together:
            forked("world", together, world)
        if section == "documented":
            before = json.loads(options.lines_of.read_text())[section] if options.lines_of else ()
            items = dict.fromkeys([*documented(), *before])
        result[section] = {}
        for item in items:
            if re.search(options.match, item):
                found, said = forked(item, together, function, item)
                result[section][item] = {"exit": found, "stdout": said} if together else found
        if together:
            result[section]["files"], _ = forked("files", together, files)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--match", default="", help="only items that match this pattern")
    parser.add_argument("--lines_of", type=Path, help="an earlier result, whose command lines are parsed too")
    parser.add_argument("--compare", nargs=2, type=Path)
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # PEFT writes sets in their order
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})  # nosec B606
    if options.compare:
        before, after = (flat(json.loads(path.read_text())) for path in options.compare)
        sides = {key: (before.get(key, "<none>"), after.get(key, "<none>")) for key in sorted({*before, *after})}
        changed = {key: pair for key, pair in sides.items() if pair[0] != pair[1]}
        for key, pair in changed.items():
            print(key, *(repr(value)[:100] for value in pair), sep="  ")
        print(f"{len(changed)} of {len(before)} keys differ", file=sys.stderr)
        return 1 if changed else 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE"), "1")
        os.environ |= dict.fromkeys(("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"), "1")
        os.environ |= {"FREEZE": folder, "HF_HOME": f"{folder}/hf", "CAPTIONRL_CACHE": f"{folder}/cache"}
        os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "ACCELERATE_USE_CPU": "true"}
        os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
        found = record(options)
    options.output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(flat(found))} keys")
    return 0


if __name__ == "__main__":
    sys.exit(main())
