"""Record what the package does, so that a refactoring can be shown to keep it: one core, no network, fixed seeds.

    python scripts/freeze.py --output before.json
    python scripts/freeze.py --output after.json --lines_of before.json   # and the command lines documented before
    python scripts/freeze.py --compare before.json after.json

Every item runs in a process forked from this one, in its own folder; a failure is recorded as the type of its exception.
"""

import argparse
import contextlib
import dataclasses
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
TINY = {
    "tiny.tiny_model": "blip git vit-gpt2 vit-bert clipcap",
    "tiny_families.tiny_family": "blip2-opt blip2-t5 instructblip-llama instructblip-t5 florence2 kosmos2 pix2struct",
    "tiny_chat.tiny_chat": "llava llava_onevision idefics3 smolvlm paligemma qwen2_vl qwen2_5_vl qwen3_vl internvl gemma3",
}
FAMILIES = {name: function for function, names in TINY.items() for name in names.split()}
METHODS = {"self-retrieval-clipcap": "self_retrieval_clipcap", "mle-clipcap": "mle_clipcap"}
METHODS |= {"smile-video": "smile_video", "smile-text": "smile_llama_lora"}  # the others end in _blip
TILED = "llava_onevision idefics3 smolvlm qwen2_vl qwen2_5_vl qwen3_vl internvl".split()
VOLATILE = re.compile(r"runtime|per_second|seconds|versions?$|^date|created|memory|hostname|platform|^(ms|pid|commit)$")
PATTERNS = {r"\d{4}-\d\d-\d\d([T ][\d:.+Z]+)?": "<date>", r"\b[\d.]+ (ms|s|min|seconds?|minutes?|hours?)\b": "<t>"}
PATTERNS |= {r"\b\d+\.\d+\.\d+([.+]\w+)*\b": "<version>", r" at 0x[0-9a-f]+": ""}
OMITTED = re.compile(r"(^|/)checkpoint-|\.lock$|cache|\.bin$|\.pt$|tfevents")


def sha(data):
    return hashlib.sha256(data if isinstance(data, bytes) else json.dumps(data).encode()).hexdigest()[:16]


def normal(value):
    """JSON without what differs between two equal runs."""
    if isinstance(value, dict):
        return {normal(str(k)): "<volatile>" if VOLATILE.search(str(k)) else normal(v) for k, v in value.items()}
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


def digest(tensors):
    import torch

    named = [(n, t.detach().contiguous()) for n, t in sorted(dict(tensors).items())]
    parts = [f"{n}{t.dtype}{[*t.shape]}".encode() + bytes(t.view(-1).view(torch.uint8).numpy()) for n, t in named]
    return f"{len(named)} tensors {sha(b''.join(parts))}"


def content(path):
    """The content of a small text, else its digest; of tensors and tables without their metadata."""
    if path.suffix == ".json":
        value = json.loads(path.read_text())
        return value if len(flat(value)) < 300 else sha(normal(value))
    if path.suffix == ".safetensors":
        return digest(importlib.import_module("safetensors.torch").load_file(path))
    if path.suffix == ".parquet":
        table = importlib.import_module("pyarrow.parquet").read_table(path)
        return {"columns": [f"{f.name}: {f.type}" for f in table.schema], "rows": sha(normal(table.to_pylist()))}
    try:
        lines = [normal(json.loads(s) if path.suffix == ".jsonl" else s) for s in path.read_text().splitlines()]
    except UnicodeDecodeError:
        return sha(path.read_bytes())
    return lines if len(lines) < 60 and path.suffix != ".html" else f"{len(lines)} lines {sha(lines)}"


def files(folder="."):
    found = {str(path.relative_to(folder)): path for path in sorted(Path(folder).rglob("*")) if path.is_file()}
    return {name: attempt(content, path) for name, path in found.items() if not OMITTED.search(name)}


def attempt(function, *arguments):
    try:
        return function(*arguments)
    except BaseException as error:
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        return f"<{type(error).__name__}>"


def forked(name, folder, function, *arguments):
    """What a function returns and prints, run in a process of its own, as JSON."""
    folder = Path(os.environ["FREEZE"], folder or sha(name))
    folder.mkdir(exist_ok=True)
    start, answer = time.time(), Path(os.environ["FREEZE"], sha(name) + ".json")
    if not (child := os.fork()):
        os.chdir(folder)
        os.dup2(os.open(answer.with_suffix(".stdout"), os.O_RDWR | os.O_CREAT), 1)
        found = attempt(function, *arguments)
        sys.stdout.flush()
        answer.write_text(json.dumps(normal(found), sort_keys=True))
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print(f"{time.time() - start:6.1f} s  {name}", file=sys.stderr)
    return json.loads(answer.read_text()) if answer.exists() else f"<ended with {status}>"


def tiny(name):
    from hf_captionrl import load_captioner

    if name not in FAMILIES:
        return load_captioner(name)
    module, function = FAMILIES[name].split(".")
    model, processor = getattr(importlib.import_module(f"tests.{module}"), function)(name)
    return load_captioner(model, processor=processor)


# Trainers: trainer, model, settings; the log, the gradients of each step and the weights of each.

TRAINING = {"max_steps": 3, "per_device_train_batch_size": 8, "learning_rate": 1e-3, "use_cpu": True, "bf16": False}
TRAINING |= {"logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "report_to": "none", "guard": "off"}
TRAINING |= {"freeze_vision_tower": True, "max_completion_length": 8, "generation_max_new_tokens": 8, "eval_steps": 3}
TRAINING |= {"gradient_checkpointing": False, "max_length": 64}
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
SelfRetrievalGRPO llava
SelfRetrievalGRPO llava cider_weight=0.5 num_generations=4
""".strip().splitlines()


def train(line):
    import datasets
    import torch
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

    import hf_captionrl as ours

    method, name, *pairs = line.split()
    settings = {key: json.loads(value) for key, value in (pair.split("=") for pair in pairs)}
    peft, stream = settings.pop("peft", None), settings.pop("stream", False)
    config = getattr(ours, f"{method}Config")
    settings = {k: v for k, v in TRAINING.items() if k in config.__dataclass_fields__} | settings
    if "cache_image_features" in config.__dataclass_fields__:
        settings["cache_image_features"] = name not in TILED and settings["freeze_vision_tower"]
    scenes = ours.load_scenes(num_train=16, num_validation=12, num_test=0)
    given = {"train_dataset": scenes["train"], "eval_dataset": scenes["validation"], "args": config("out", **settings)}
    torch.manual_seed(0)
    if method == "SmileSFT":
        tokenizer = importlib.import_module("tests.tiny_chat").chat_tokenizer(())
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes))
        texts = [{"prompt": f"Say {n}: ", "completion": f"One red cat. It is {n}. The dog is blue! A cat."} for n in "abcdef"]
        given |= {"train_dataset": datasets.Dataset.from_list(texts), "processing_class": tokenizer, "eval_dataset": None}
    elif method == "SelfRetrievalGRPO":
        model, given["processing_class"] = importlib.import_module("tests.tiny_chat").tiny_chat(name)
        del given["eval_dataset"]
    else:
        model = tiny(name)
    if method.startswith("SelfRetrieval"):
        given["scorer"] = ours.load_scorer("scenes:clip-reward")
    if method == "SelfRetrieval":
        given["held_out_scorer"] = ours.load_scorer("scenes:siglip-held-out")
    if method == "CaptionRL":
        given["reward_funcs"] = [lambda context: [1.0 + len(caption) % 3 for caption in context.captions]]
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
    return {"gradients": steps, "log": trainer.state.log_history, "weights": digest(trainer.model.named_parameters())}


# Saved folders, and what the captioners read from them do.


def save(name):
    import torch

    from hf_captionrl import load_captioner, load_scenes

    tiny(name).save_pretrained("saved")
    captioner = load_captioner("saved")
    images = [row["image"].convert("RGB") for row in load_scenes(num_train=0, num_validation=0, num_test=3)["test"]]
    encoded = captioner.encode_images(images)
    found = {"files": files("saved"), "class": type(captioner).__name__}
    for key in ({"num_beams": 1}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2, "temperature": 0.7}):
        torch.manual_seed(0)
        found[f"captions {key}"] = captioner.generate(**encoded, max_new_tokens=6, **key).captions
    scored = captioner.log_probs(captioner.collate(images, ["a red cat", "two small birds near the tree", "a dog"]))
    return found | {"log_probs": scored.detach()}


# Recipes: arguments that make them small.

EVALUATION = "--use_cpu --disable_tqdm true --gallery_size 4 --logging_steps 1 --per_device_eval_batch_size 64 "
WRITING = EVALUATION + "--generation_max_new_tokens 10 --generation_num_beams 2 "
IMAGES = "--max_train_images 16 --max_eval_images 8 --max_test_images 105 --max_steps 2 --per_device_train_batch_size 8 "
RL = "--eval_steps 2 --save_steps 2 --eval_strategy steps --save_strategy steps --max_completion_length 8 "
RECIPES = {
    "smile_blip": IMAGES + WRITING,
    "mle_clipcap": IMAGES + WRITING + "--warmup_steps 1 --eval_steps 2 --save_steps 2",
    "self_retrieval_blip": IMAGES + WRITING + RL + '--bag_schedule {"1":2} --num_neighbours 8',
    "self_retrieval_clipcap": IMAGES + WRITING + RL + "--num_neighbours 8",
    "sle_blip": IMAGES + WRITING + RL + "--num_generations 3 --num_samples 2 --sample_images 2 --sample_temperatures 0.5",
    "smile_video": IMAGES.replace("105", "18") + WRITING + RL.replace("--max_completion_length 8", ""),
    "smile_llama_lora": "--max_train_rows 16 --num_train_epochs 1 --pretrain_epochs 1 --answer_max_new_tokens 6 --max_steps 2",
}


def recipe(name):
    folders = ["--output_dir", "out", "--seed", "3"]
    importlib.import_module(f"recipes.{name}").main([*folders, *shlex.split(RECIPES[name].replace('"', r"\""))])
    return files("out")


# Commands, one after another in one folder: standard output, exit code; at the end every file.

COMMANDS = """
caption scenes:blip-mle --max_images 20 --max_new_tokens 8 --output a.jsonl
caption scenes:blip-smile --max_images 20 --max_new_tokens 8 --num_beams 1 --num_return_sequences 2 --do_sample --output b.jsonl
caption scenes:blip-sr --dataset imagefolder --data_dir photos --max_new_tokens 8 --output c.jsonl --json
caption scenes:blip-mle --max_images 20 --max_new_tokens 8 --output shards --processes 2
features --max_images 20 --output features
pixels --model scenes:blip-mle --max_images 20 --output pixels
bags --max_images 20 --bag_sizes 3 --output bags.parquet
bags --max_images 20 --mode neighbours --output neighbours.safetensors
album photos --model scenes:blip-mle --scorer scenes:siglip-held-out --max_new_tokens 8 --output album.csv album.html album.jsonl
album photos --captions c.jsonl --scorer scenes:siglip-held-out --output diagnosis.html diagnosis.csv
album photos --model scenes:blip-mle --scorer scenes:siglip-held-out --max_new_tokens 8 --sidecars --trigger ohwx --drop_shared --output words.csv --json
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
train smile-text --output_dir text --max_train_rows 16 --pretrain_epochs 1 --answer_max_new_tokens 6 --max_steps 2
train --json smile --output_dir blip --perplexity_name_or_path none
card blip/model --check
push blip/model --dry_run
caption nowhere
caption scenes:blip-mle --max_imagse 3
evaluate --captions gone.jsonl
"""


def world():
    """What the commands read: 20 scenes as a folder, one pair of Winoground, an old checkpoint."""
    import torch

    from hf_captionrl import load_scenes

    scenes = load_scenes(num_train=0, num_validation=0, num_test=20)["test"]
    rows = [{"file_name": f"{n}.png", "captions": row["captions"]} for n, row in enumerate(scenes)]
    for n, row in enumerate(scenes):
        put(f"photos/{n}.png", row["image"])
        put(f"winoground/images/ex_0_img_{n}.png", row["image"])
    put("photos/metadata.jsonl", rows)
    put("winoground/examples.jsonl", [{f"{k}_{i}": v for i in (0, 1) for k, v in (("image", f"ex_0_img_{i}"), ("caption", "a pig"))}])
    torch.save({"weight": torch.ones(2)}, "old.bin")


def command(line):
    if line.startswith("study score"):
        answer_files = importlib.import_module("hf_captionrl.studies.answer_files")
        key = answer_files.read_key(Path("ratings"))
        answers = [{"question": q["id"], "values": [3, 4, 5], "ms": 9} for q in key["parts"]["rater-1"]]
        value = {"format": answer_files.ANSWERS_FORMAT, "study": key["fingerprint"], "part": "rater-1", "participant": "p"}
        value |= {"started": "2026-01-02T03:04:05.678Z", "exported": "2026-01-02T04:04:05.678Z", "answers": answers}
        put("answers.json", value | {"checksum": answer_files.answers_checksum(value)})
    sys.argv = ["captionrl", *shlex.split(line)]
    try:
        runpy.run_module("hf_captionrl.cli", run_name="__main__")
    except SystemExit as stop:
        return stop.code


def put(path, value):
    """Write a file of the kind that its name says."""
    import datasets
    from PIL import Image

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".png", ".jpg", ".gif", ".mp4"):
        shades = [Image.new("RGB", (16 + value, 16), (20 * value, 40 * k, 0)) for k in range(3)] if isinstance(value, int) else [value]
        shades[0].save(path, "GIF" if path.suffix in (".gif", ".mp4") else None, **({"save_all": True, "append_images": shades[1:], "duration": 100} if path.suffix in (".gif", ".mp4") else {}))
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(value).to_parquet(path)
    else:
        lines = "\n".join(map(json.dumps, value)) if path.suffix == ".jsonl" else json.dumps(value)
        path.write_text(value if isinstance(value, str) else lines)
    return str(path)


# Metrics: keyword arguments of `compute`, of the texts T, their references R, the images I and made-up features.

METRICS = """
self_retrieval dict(predictions=T, references=I, scorer="scenes:siglip-held-out")
self_retrieval dict(predictions=T, references=[0, 1, 2, 3, 4, 5], text_features=F, image_features=F[::-1], bags=[[0, 1, 2]], ks=[1, 3])
self_retrieval dict(predictions=T, text_features=F, image_features=F[::-1], num_distractors=2, protocol="sampled", repeats=2)
caption_diversity dict(predictions=T, image_ids=[0, 0, 0, 1, 1, 1])
caption_diversity dict(predictions=[T[:3], T[3:]])
caption_faithfulness dict(predictions=T, references=facts)
caption_nlg dict(predictions=T, references=R)
caption_nlg dict(predictions=T, references=R, which=["meteor"])
caption_perplexity dict(predictions=T, model="scenes:gpt2-perplexity")
clip_score dict(predictions=T, references=I, scorer="scenes:siglip-held-out", prefix="")
clip_score dict(predictions=T, references=F, text_features=F[::-1], preset="ndlb")
emscore dict(predictions=T, references=[I[:2]] * 6, scorer="scenes:clip-reward")
emscore dict(predictions=T[:1], references=[[[1.0, 0.0], [0.0, 1.0]]], token_features=[[[1.0, 0.0], [0.6, 0.8]]])
"""


def measure(line):
    import evaluate

    import hf_captionrl

    name, arguments = line.split(" ", 1)
    rows = hf_captionrl.load_scenes(num_train=0, num_validation=0, num_test=6)["test"]
    given = {"T": [row[0] for row in rows["captions"]], "R": [row[1:] for row in rows["captions"]], "I": list(rows["image"])}
    given |= {"F": [[n / 10, 1 - n / 10, 0.3] for n in range(6)], "facts": list(rows["facts"])}
    return evaluate.load(name).compute(**eval(arguments, given))


# Command lines of the pages, parsed and not run. Recipes: what differs from the recipe without arguments.


def parse_recipe(name, words):
    words = list(words)
    for n in range(1, len(words)):
        if words[n - 1] == "--config" and not Path(words[n]).exists() and "/" not in words[n]:
            words[n] = f"recipes/configs/{name}/{words[n]}"
    parsed = importlib.import_module(f"recipes.{name}").parse_args(words)
    return {k: v for part in parsed for k, v in dataclasses.asdict(part).items()}


def parse(line):
    from hf_captionrl.cli.main import build_parser

    os.chdir(ROOT)
    words, found = shlex.split(line, comments=True), {}
    if words[0] == "captionrl":
        found = {k: v for k, v in vars(build_parser().parse_args(words[1:])).items() if k not in ("run", "is_resumable")}
        if found.get("command") != "train":
            return found
        words = [f"recipes/{METHODS.get(found['method'], found['method'].replace('-', '_') + '_blip')}.py", *found["arguments"]]
    at = next(n for n, word in enumerate(words) if re.fullmatch(r"(\./)?recipes/\w+\.py", word))
    name = Path(words[at]).stem
    usual = parse_recipe(name, []) if words[at + 1 :] else {}
    return found | {k: v for k, v in parse_recipe(name, words[at + 1 :]).items() if k not in usual or usual[k] != v}


def documented():
    """Shell blocks and code spans; a continued line in one piece. Also every preset."""
    from hf_captionrl.experiments.rows import load_row, row_names

    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text().replace("\\\n", " ")
        blocks = re.findall(r"^ *```(?:bash|sh)\n(.*?)^ *```", text, re.M | re.S)
        for line in [*"\n".join(blocks).splitlines(), *re.findall(r"`([^`\n]+)`", text)]:
            for part in re.split(r" && |\|", line):
                part = " ".join(re.split(r" +#| >|<br>", part)[0].split())
                if re.match(r"captionrl \w+ ?|(python|accelerate launch) .*recipes/\w+\.py", part):
                    yield part
    yield from (f"python recipes/{name}.py" for name in RECIPES)
    configs = ROOT / "recipes" / "configs"
    yield from (f"python recipes/{load_row(configs, row).recipe}.py --row {row}" for row in row_names(configs))
    yield from (f"python recipes/{f.parent.name}.py --config {f.name}" for f in sorted(configs.glob("[!r]*/*.yaml")))


# Data: name, files to write, arguments of `load_caption_splits`; id, captions and size of every row of every split.

N = range(12)
TEXTS = [[f"caption {k} of  {n}" for k in "ab"] for n in N]
ROWS = [{"file_name": f"{n}.png", "captions": TEXTS[n], "nr": n, "split": "train val test".split()[n % 3]} for n in N]
ONE = [{"image": f"{n}.png", "caption": TEXTS[n][0], "nr": 7 * n} for n in N]
KARPATHY = [{"filename": f"{n}.png", "imgid": n, "split": ["train", "restval", "val", "test"][n % 4], "sentences": [{"raw": t} for t in TEXTS[n]]} for n in N]
COCO = [row | {"filepath": "p", "cocoid": 1000 + row["imgid"]} for row in KARPATHY]
NOCAPS = {
    "images": [{"id": n, "file_name": f"{n}.png", "domain": ["in-domain", "near-domain", "out-domain"][n % 3]} for n in N],
    "annotations": [{"id": n, "image_id": n % 12, "caption": f"text {n}"} for n in range(24)],
}
CONCADIA = [{"filename": f"{n}.png", "split": ["train", "val", "test"][n % 3]} | {k: {"raw": f"{k} of {n}"} for k in ("caption", "description", "context")} for n in N]
VIDEOS = {
    "videos": [{"video_id": f"video{n}", "split": ["train", "validate", "test"][n % 3]} for n in N],
    "sentences": [{"video_id": f"video{n % 12}", "caption": f"text {n}"} for n in range(24)],
}
TGIF = {"tgif-v1.0.tsv": "".join(f"https://media.example/{n:x}/t{n}.gif\t{t}\n" for n in N for t in TEXTS[n])}
TGIF |= {f"splits/{s}.txt": "".join(f"https://media.example/{n:x}/t{n}.gif\n" for n in N if n % 3 == k) for k, s in enumerate(("train", "val", "test"))}
CSV = "image,caption,caption,nr\n" + "".join(f'{n}.png,"{a}, yes",{b},{n}\n' for n, (a, b) in enumerate(TEXTS))
SOURCES = {
    "imagefolder": ({"p/metadata.jsonl": ROWS}, "imagefolder", {"data_dir": "p"}),
    "folder, undivided": ({"p/metadata.jsonl": ROWS}, "p", {"split_fractions": (1, 0, 0)}),
    "folder, shares": ({"p/metadata.jsonl": ROWS}, "p", {"split_fractions": (0.5, 0.25, 0.25), "seed": 4, "image_id_column": "nr"}),
    "folder, csv": ({"p/metadata.csv": CSV.replace("image", "file_name", 1)}, "p", {}),
    "folder, parquet": ({"p/metadata.parquet": ROWS}, "p", {}),
    "folder, splits": ({f"p/{s}/metadata.jsonl": [{"file_name": f"../{n}.png", "text": s} for n in N] for s in ("train", "val", "test")}, "p", {}),
    "folder, no captions": ({}, "p", {"require_captions": False}),
    "karpathy": ({"dataset_coco.json": {"images": COCO}}, "dataset_coco.json", {"image_root": "."}),
    "karpathy, flickr": ({"dataset_flickr30k.json": {"images": KARPATHY}}, "dataset_flickr30k.json", {"image_root": "p"}),
    "csv": ({"rows.csv": CSV}, "rows.csv", {"image_root": "p"}),
    "jsonl": ({"p/rows.jsonl": ONE}, "p/rows.jsonl", {"image_id_column": "nr"}),
    "json": ({"p/rows.json": ONE}, "p/rows.json", {}),
    "parquet": ({"p/rows.parquet": ONE}, "p/rows.parquet", {}),
    "nocaps": ({"nocaps_val_4500_captions.json": NOCAPS}, "nocaps", {"data_dir": ".", "image_root": "p"}),
    "concadia": ({"wiki_split.json": {"images": CONCADIA}}, "concadia", {"data_dir": ".", "image_root": "p"}),
    "concadia, description": ({"wiki_split.json": {"images": CONCADIA}}, "concadia", {"data_dir": ".", "image_root": "p", "caption_column": "description"}),
    "imagecode": ({"valid_data.json": {"set_1": {"5": "a deer", "0": "a bird"}, "video-shot1_0": {"9": "two girls"}}}, "imagecode", {"data_dir": "."}),
    "tgif": (TGIF, "tgif", {"data_dir": ".", "num_frames": 2}),
    "msr-vtt": ({"videodatainfo.json": VIDEOS}, "msr-vtt", {"data_dir": ".", "num_frames": 2}),
    "scenes": ({}, "scenes", {}),
    "scenes, full_caption": ({}, "scenes", {"caption_column": "full_caption"}),
    "scenes, alt_text": ({}, "scenes", {"dataset_config": "alt_text"}),
    "scenes, shapes": ({}, "scenes", {"dataset_config": "shapes"}),
    "moving_scenes": ({}, "moving_scenes", {"num_frames": 2}),
}


def rows_of(rows):
    from hf_captionrl.data import is_video, open_image, sample_frames

    found = []
    for row in rows:
        image = row["image"]
        size = None if len(found) > 30 else [f.size for f in sample_frames(image, 2)] if is_video(image) else open_image(image).size
        found.append([row["image_id"], row.get("captions", row.get("caption")), size])
    return found if len(found) < 30 else [len(found), sha(normal(found))]


def source(name):
    from hf_captionrl.data import check_captions, load_caption_splits

    written, data, arguments = SOURCES[name]
    for n in N:
        put(f"p/{n}.png", n)
        for path in (f"gifs/t{n}.gif", f"videos/video{n}.mp4"):
            put(path, n)
        for folder in ("set_1", "video-shot1_0") if n < 10 else ():
            put(f"image-sets/{folder}/img{n}.jpg", n)
    for path, value in written.items():
        put(path, value)
    splits = load_caption_splits(data, **arguments)
    checked, report = check_captions(splits)
    found = {split: {"columns": rows.column_names, "rows": rows_of(rows)} for split, rows in checked.items()}
    return found | {"quarantined": report.counts()}


def streaming(_):
    import datasets

    from hf_captionrl.data import CaptionDataset, StreamedCaptions, load_captions

    put("p/metadata.jsonl", ROWS), [put(f"p/{n}.png", n) for n in N]
    rows = load_captions("p", split="all")
    found = {}
    for name, items in (("stream", StreamedCaptions(rows.to_iterable_dataset(3))), ("memory", CaptionDataset(rows))):
        for epoch in (0, 1):
            items.set_epoch(epoch)
            found[f"{name} {epoch}"] = [[i["image_id"], i["caption"]] for i in items]
    return found


SECTIONS = {
    "trainers": lambda: (TRAINERS, train),
    "recipes": lambda: (RECIPES, recipe),
    "commands": lambda: (COMMANDS.strip().splitlines(), command),
    "metrics": lambda: (METRICS.strip().splitlines(), measure),
    "documented": lambda: (dict.fromkeys(documented()), parse),
    "data": lambda: (SOURCES, source),
    "streaming": lambda: (["draws"], streaming),
    "saved": lambda: (["scenes:blip-mle", *FAMILIES], save),
}


def flat(value, path=""):
    """Leaves by path."""
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for k, v in pairs for key, leaf in flat(v, f"{path}/{k}").items()}
    return {path: value}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--match", default="", help="only items that match this pattern")
    parser.add_argument("--lines_of", type=Path, help="an earlier result, whose command lines are parsed too")
    parser.add_argument("--compare", nargs=2, type=Path)
    options = parser.parse_args()
    if options.compare:
        before, after = (flat(json.loads(path.read_text())) for path in options.compare)
        changed = [key for key in sorted({*before, *after}) if before.get(key, "<none>") != after.get(key, "<none>")]
        for key in changed:
            print(f"{key}: {str(before.get(key, '<none>'))[:80]!r} -> {str(after.get(key, '<none>'))[:80]!r}")
        print(f"{len(changed)} of {len(before)} keys differ")
        return 1 if changed else 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"FREEZE": folder, "HF_HOME": f"{folder}/hf", "CAPTIONRL_CACHE": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
        os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        os.environ |= {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
        os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "ACCELERATE_USE_CPU": "true"}
        for name in ("datasets", "evaluate", "peft", "trl", "transformers", *(f"recipes.{name}" for name in RECIPES)):
            importlib.import_module(name)
        found = {}
        for section in options.only:
            items, function = SECTIONS[section]()
            if section == "documented" and options.lines_of:
                items |= json.loads(options.lines_of.read_text())[section]
            together = Path(folder, "commands") if section == "commands" else None
            if together:
                forked("world", together, world)
            items = [item for item in items if re.search(options.match, item)]
            found[section] = {item: forked(item, together, function, item) for item in items}
            if together:
                for item in items:
                    said = normal(Path(folder, sha(item) + ".stdout").read_text())
                    with contextlib.suppress(ValueError):
                        said = normal(json.loads(said))
                    found[section][item] = {"exit": found[section][item], "stdout": said}
                found[section]["files"] = forked("files", together, files)
    options.output.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(flat(found))} keys")
    return 0


if __name__ == "__main__":
    sys.exit(main())
