"""What a model reaches on the test split, its card, and the log of its training."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    GPT2LMHeadModel,
)

from hf_captionrl.captioners import load_captioner
from hf_captionrl.captioners.pipeline import generate_captions
from hf_captionrl.metrics import caption_perplexity
from hf_captionrl.metrics.suites import smile_suite
from hf_captionrl.retrieval import load_scorer
from hf_captionrl.scenes import BAG_SIZES, bags, check, load_scenes
from hf_captionrl.scenes.grammar import vocabulary
from hf_captionrl.utils.model_files import MODELS
from scripts.scenes_models.parts import CHECKPOINTS


def measure(name: str) -> dict[str, float]:
    """What a shipped model reaches on the test split."""
    test = load_scenes(num_train=0, num_validation=0)["test"]
    folder = str(CHECKPOINTS / name)
    full = list(test["full_caption"])
    references = [row[2] for row in test["captions"]]
    if name in ("clip-reward", "siglip-held-out"):
        scorer = load_scorer(folder)
        images = scorer.image_features(list(test["image"]))
        numbers: dict[str, float] = {}
        for kind, captions in {"full_caption": full, "reference": references}.items():
            text = scorer.text_features(captions)
            row = smile_suite(
                captions,
                text_features=text,
                image_features=images,
                bags={size: bags(list(test["bag_id"]), size) for size in BAG_SIZES},
            )
            numbers |= {
                f"{kind}_{key}": row[key] for key in row if key.endswith("recall_at_1") and row[key] is not None
            }
        return numbers
    if name.startswith("gpt2"):
        model = GPT2LMHeadModel.from_pretrained(folder, use_safetensors=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        shuffled = [" ".join(np.random.default_rng(i).permutation(c.split())) for i, c in enumerate(full)]
        texts = {"full_caption": full, "reference": references, "shuffled_full_caption": shuffled}
        return {
            f"{kind}_perplexity": caption_perplexity(captions, model, tokenizer)["perplexity"]
            for kind, captions in texts.items()
        }
    captioner = load_captioner(folder, dtype=torch.float32)
    captions = generate_captions(captioner, list(test["image"]), batch_size=250, num_beams=1, max_new_tokens=30)
    held_out_scorer = load_scorer(str(CHECKPOINTS / "siglip-held-out"))
    row = smile_suite(
        captions,
        text_features=held_out_scorer.text_features(captions),
        image_features=held_out_scorer.image_features(list(test["image"])),
        bags={size: bags(list(test["bag_id"]), size) for size in BAG_SIZES},
        facts=list(test["facts"]),
        check=check,
        references=list(test["captions"]),
    )
    lengths = [len(c.split()) for group in test["captions"] for c in group]
    return {
        "length": row["length"],
        "reference_length": float(np.mean(lengths)),
        **{key: row[key] for key in ("hallucination", "fact_recall", "cider_d", "lexical_diversity")},
        **{key: row[key] for key in row if key.endswith("recall_at_1")},
    }


def write_card(entry: dict[str, Any]) -> None:
    """Write a checkpoint's model card from its log."""
    library = "transformers"
    lines = [
        "---",
        "license: apache-2.0",
        f"library_name: {library}",
        "language: en",
        "tags: [hf_captionrl]",
        "---",
        "",
    ]
    lines += [f"# {entry['name']}", "", MODELS[entry["name"]], ""]
    lines += [
        "A tiny model of the embedded world of hf_captionrl. It knows nothing else: do not use it on photographs.",
        "",
    ]
    lines += [
        "## Training",
        "",
        f"`{entry['command']}`, on one CPU thread, without any other data than the world's rules.",
        "",
    ]
    skipped = ("name", "stage", "measured", "command")
    lines += [f"- {key}: {value}" for key, value in entry.items() if key not in skipped]
    lines += ["", "## Measured on the test split (1,000 scenes)", ""]
    lines += [f"- {key}: {value:.4f}" for key, value in entry["measured"].items()]
    lines += [
        "",
        f"Limitations: a vocabulary of {len(vocabulary())} tokens; images of 72 x 72 pixels.",
        "",
    ]
    (CHECKPOINTS / entry["name"] / "README.md").write_text("\n".join(lines), encoding="utf-8")


def append_log(entry: dict[str, Any]) -> None:
    """Add a run to `training_log.json`; a run of the same name replaces the older one."""
    file = CHECKPOINTS / "training_log.json"
    entries = json.loads(file.read_text()) if file.exists() else []
    entries = [e for e in entries if e["name"] != entry["name"]] + [{**entry, "torch": torch.__version__}]
    file.write_text(json.dumps(sorted(entries, key=lambda e: e["name"]), indent=2) + "\n")
