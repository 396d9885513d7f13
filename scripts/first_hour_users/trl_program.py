"""What a user of TRL writes first: a raw data set, a scorer by its name, a reward function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import torch

from hf_captionrl import SelfRetrievalConfig, SelfRetrievalTrainer, SmileTrainer, load_scenes, load_scorer

CALLS: list[dict[str, int]] = []
KNOWN: dict[str, str] = {}


def brevity(completions: list[str], text: list[str], **columns: Any) -> list[float | None]:
    """Six words are best."""
    matched = all(KNOWN.get(one) == source for one, source in zip(text, columns["source"], strict=True))
    CALLS.append({"completions": len(completions), "columns": len(text), "matched": int(matched)})
    return [-abs(len(caption.split()) - 6) / 6 for caption in completions]


def raw_dataset(number: int) -> datasets.Dataset:
    """Images and texts as they come from anywhere: no ids, one text each."""
    scenes = load_scenes(num_train=number, num_validation=0, num_test=0)["train"]
    rows = {
        "image": [row["image"] for row in scenes],
        "text": [row["captions"][0] + "," * number for number, row in enumerate(scenes)],
        "source": [f"camera {number}" for number in range(len(scenes))],
    }
    KNOWN.update(zip(rows["text"], rows["source"], strict=True))
    return datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())


def main() -> None:
    """Train three steps, and write down what happened."""
    train = raw_dataset(120)  # a step takes 100 images by default
    Path("photos").mkdir(exist_ok=True)
    for number in range(8):
        train[number]["image"].save(f"photos/{number}.png")
    scorer = load_scorer("scenes:clip-reward")
    default = SmileTrainer("scenes:blip-mle", train_dataset=train)
    trainer = SelfRetrievalTrainer(
        "scenes:blip-mle",
        scorer,
        # The shipped scorer reads 38 tokens; CLIP reads 75.
        SelfRetrievalConfig(
            "outputs/sr", max_steps=3, learning_rate=1e-4, max_completion_length=20, report_to="none", logging_steps=1
        ),
        train_dataset=train,
        reward_funcs=["self_retrieval", brevity],
    )
    before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    trainer.save_model()
    trained = {name: value for name, value in trainer.model.named_parameters() if value.requires_grad}
    changed = sum(int((value.detach().cpu() != before[name].cpu()).sum()) for name, value in trained.items())
    expected = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    found = {
        "default_folder": Path(str(default.args.output_dir)).name,
        "changed": changed / sum(value.numel() for value in trained.values()),
        "dtypes": sorted({str(value.dtype) for value in trained.values()}),
        "calls": len(CALLS),
        "completions": CALLS[0]["completions"],
        "columns": CALLS[0]["columns"],
        "matched": all(call["matched"] for call in CALLS),
        "expected": expected * trainer.args.num_generations,
        "logged": sorted({key for entry in trainer.state.log_history for key in entry}),
        "steps": trainer.state.global_step,
        "finite": all(bool(torch.isfinite(value).all()) for value in trained.values()),
    }
    Path("found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
