"""Train an image-text scorer for a domain: a pretrained vision tower and a pretrained text encoder, aligned by contrastive learning.

Such a scorer rewards and evaluates captions where CLIP was not trained, or cannot be had. The vision tower is frozen, and its
features are cached, so an epoch costs what the text encoder costs.

Without arguments, on the embedded world (minutes on 2 CPU cores, no network):

    accelerate launch recipes/scorer.py

On photographs with captions:

    captionrl train scorer --vision_model google/efficientnet-b0 --text_model sentence-transformers/all-MiniLM-L6-v2 \
        --dataset_name imagefolder --data_dir photos --output_dir outputs/scorer

Pass the folder `model/` that it writes as `--scorer` or `--scorer_name_or_path`. A scorer that rewards must not evaluate: train two,
with other towers and seeds.

Source: Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision", section 2.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    Trainer,
    TrainingArguments,
    VisionTextDualEncoderModel,
    VisionTextDualEncoderProcessor,
    set_seed,
)

from hf_captionrl.apps.experiments.arguments import (
    DataArguments,
    RecipeDefaults,
    configuration_line,
    output_folder,
    parse_arguments,
)
from hf_captionrl.apps.experiments.data import describe_data, load_data
from hf_captionrl.apps.experiments.report import alone_in_folder, train_or_resume
from hf_captionrl.data.features import cached_features
from hf_captionrl.metrics.bootstrap import proportion_interval
from hf_captionrl.retrieval import FeatureCache, model_fingerprint
from hf_captionrl.retrieval.feature_cache import tower_in_parts
from hf_captionrl.retrieval.ranking import ranks
from hf_captionrl.retrieval.scorer import assemble_scorer
from hf_captionrl.trainers.checkpoints import ExactResumeArguments, ExactResumeTrainer
from hf_captionrl.trainers.policy import autocast, refuse_data_parallel
from hf_captionrl.utils.console import run_main
from hf_captionrl.utils.io import atomic_write_text, installed_versions, write_json
from hf_captionrl.utils.model_files import load_pretrained, model_path, read_config
from hf_captionrl.utils.options import Positive, Share, documented

__all__ = ["main", "parse_args"]

CONFIGS = Path(__file__).parent / "configs" / "scorer"
KS = (1, 5, 10)
MAX_TEXT_TOKENS = 40

# Legend: B captions and their images, D features of the vision tower, P dimensions of the shared space, T tokens.


@dataclass
class ScorerArguments:
    """The parts of the scorer."""

    model_name_or_path: str | None = documented(
        None, "A trained scorer that is trained further, instead of vision_model and text_model."
    )
    vision_model: str = documented("google/efficientnet-b0", "Vision tower that pools, frozen.", aliases=["--vision"])
    text_model: str = documented("sentence-transformers/all-MiniLM-L6-v2", "Text tower, trained.", aliases=["--text"])
    projection_dim: Positive = documented(384, "Dimensions of the shared space.")
    feature_dropout: Share = documented(0.4, "Dropout on the cached image features in training.")
    joined_captions: bool = documented(
        False, "Train on all captions of an image joined to one text, not on one at random."
    )

    def load(self) -> tuple[VisionTextDualEncoderModel, VisionTextDualEncoderProcessor]:
        """The model, whose projections are untrained, and its processor."""
        if self.model_name_or_path is None:
            model, processor = assemble_scorer(self.vision_model, self.text_model, self.projection_dim)
        else:
            name = model_path(self.model_name_or_path)
            if (kind := read_config(name).model_type) != "vision-text-dual-encoder":
                raise ValueError(f"model_name_or_path is of type {kind!r}. Use one that this recipe has trained.")
            model = load_pretrained(VisionTextDualEncoderModel, name, dtype=torch.float32)[0]
            processor = VisionTextDualEncoderProcessor.from_pretrained(name, trust_remote_code=False)
        model.vision_model.requires_grad_(False)
        return model, processor


@dataclass
class ScorerConfig(RecipeDefaults, ExactResumeArguments, TrainingArguments):
    """Training of the scorer."""

    output_dir: str | None = output_folder("scorer")
    projection_learning_rate: float = documented(2e-3, "Peak learning rate of the projections and the temperature.")
    learning_rate: float = documented(1e-4, "Peak learning rate of the text encoder.")
    num_train_epochs: float = documented(12, "Number of epochs; each sees one caption of every image.")
    per_device_train_batch_size: int = documented(192, "Images per device and step, each with one caption.")
    lr_scheduler_type: str = documented("cosine", "Learning rate schedule.")
    warmup_steps: float = documented(0.1, "Share of the steps with a rising learning rate.")
    weight_decay: float = documented(0.01, "Weight decay of the text encoder; the projections have ten times as much.")
    metric_for_best_model: str | None = documented("recall_at_1", "Metric that selects the epoch.")
    dataloader_drop_last: bool = documented(True, "Leave out the last, smaller batch of an epoch.")
    remove_unused_columns: bool = documented(False, "Must stay False: the collator needs all columns.")
    feature_cache_dir: str | None = documented(None, "Folder of the caches. None: $CAPTIONRL_CACHE or under $HF_HOME.")


class Pairs(torch.utils.data.Dataset[dict[str, Any]]):
    """Image features and captions of a split."""

    def __init__(self, features: Any, captions: Sequence[Sequence[str]]) -> None:
        self.features, self.captions = features, captions

    def __len__(self) -> int:
        return len(self.captions)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"features": self.features.tensor(row).float(), "captions": list(self.captions[row])}


class ScorerTrainer(ExactResumeTrainer, Trainer):  # type: ignore[misc]
    """Aligns captions with cached image features by the symmetric contrastive loss."""

    def __init__(
        self, parts: ScorerArguments, model: Any, args: ScorerConfig, rows: Any = None, **kwargs: Any
    ) -> None:
        refuse_data_parallel(args)
        if args.world_size > 1:
            raise ValueError(f"{args.world_size} processes were started, and the loss needs all captions in one.")
        self.parts, self.image_rows = parts, rows
        super().__init__(model, args, data_collator=self._collate, **kwargs)
        if self.train_dataset is not None and len(self.train_dataset) < args.train_batch_size:
            raise ValueError(f"per_device_train_batch_size must be at most {len(self.train_dataset)}, the images.")

    def _collate(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        # One caption of each image at random, from torch's generator, whose state checkpoints hold.
        chosen = [
            " ".join(item["captions"])
            if self.parts.joined_captions
            else item["captions"][int(torch.randint(len(item["captions"]), ()))]
            for item in items
        ]
        return {"features": torch.stack([item["features"] for item in items]), **self._tokens(chosen)}

    def _tokens(self, captions: Sequence[str]) -> dict[str, Tensor]:
        tokenizer, config = (
            self.processing_class.tokenizer,
            self.accelerator.unwrap_model(self.model).config.text_config,
        )
        length = MAX_TEXT_TOKENS * (5 if self.parts.joined_captions else 1)
        length = min(length, tokenizer.model_max_length, getattr(config, "max_position_embeddings", length))
        return dict(tokenizer(list(captions), padding=True, truncation=True, max_length=length, return_tensors="pt"))

    def create_optimizer(self) -> torch.optim.Optimizer:
        """AdamW with a larger rate and decay for the projections, which are untrained."""
        if self.optimizer is None:  # type: ignore[has-type]
            config, model = self.args, self.model
            heads = [model.visual_projection.weight, model.text_projection.weight, model.logit_scale]
            text = [p for p in model.text_model.parameters() if p.requires_grad]
            groups = [
                {"params": heads, "lr": config.projection_learning_rate, "weight_decay": 10 * config.weight_decay},
                {"params": text, "lr": config.learning_rate, "weight_decay": config.weight_decay},
            ]
            self.optimizer = torch.optim.AdamW(groups)
        return self.optimizer

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any) -> Any:
        """The mean cross-entropy of finding the caption of each image and the image of each caption in the batch."""
        features = F.dropout(inputs.pop("features"), self.parts.feature_dropout, training=model.training)
        with autocast(self.args):  # Accelerate's covers only the forward of the whole model, which is not called
            images, texts = model.visual_projection(features), model.text_projection(model.text_model(**inputs)[1])
        images, texts = F.normalize(images.float(), dim=-1), F.normalize(texts.float(), dim=-1)  # (B, P)
        logits = images @ texts.T * model.logit_scale.exp().clamp(max=100)  # (B, B)
        own = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    @torch.no_grad()
    def caption_ranks(self, pairs: Pairs) -> tuple[Tensor, np.ndarray]:
        """Rank of its image for every caption of a split, and the image of each caption."""
        model = self.model.eval()
        features = pairs.features.tensor().float().to(model.device)
        images = F.normalize(model.visual_projection(features), dim=-1)
        captions = [text for texts in pairs.captions for text in texts]
        own: np.ndarray = np.repeat(np.arange(len(pairs)), [len(texts) for texts in pairs.captions])
        found = []
        for start in range(0, len(captions), 128):
            tokens = self._prepare_inputs(self._tokens(captions[start : start + 128]))
            with autocast(self.args):
                texts = model.text_projection(model.text_model(**tokens)[1])
            found.append(F.normalize(texts.float(), dim=-1))
        return ranks(torch.cat(found), images, torch.from_numpy(own)), own

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Recall of the images by their captions among all images of the split."""
        rank, _ = self.caption_ranks(self.eval_dataset if eval_dataset is None else eval_dataset)
        metrics = {f"{metric_key_prefix}_recall_at_{k}": (rank <= k).float().mean().item() for k in KS}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)  # type: ignore[has-type]
        return metrics


def parse_args(argv: Sequence[str] | None = None) -> tuple[Any, ...]:
    """Parse the command line."""
    types = (ScorerArguments, DataArguments, ScorerConfig)
    return parse_arguments(types, argv, default_config=CONFIGS / "scenes.yaml")


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the recipe."""
    return train(parse_args(argv))


def card(arguments: tuple[Any, ...], results: dict[str, Any], description: str) -> str:
    """The card of the scorer."""
    parts, data, _ = arguments
    vision, text, name = (
        Path(n).name if Path(n).exists() else n for n in (parts.vision_model, parts.text_model, data.dataset_name)
    )
    if parts.model_name_or_path is not None:
        vision, text = f"the vision tower of {Path(parts.model_name_or_path).name}", "its text encoder"
    recall = results["recall"].items()
    rows = "\n".join(f"| R@{k} | {one['value']:.3f} | [{one['low']:.3f}, {one['high']:.3f}] |" for k, one in recall)
    return f"""---
library_name: transformers
tags: [image-text-retrieval, hf_captionrl]
license: other
---

# Image-text scorer of {name}

A `VisionTextDualEncoder` of {vision} (frozen) and {text}, aligned with the captions of {name}: {description}

{results["captions"]:,} captions of the test split, each among {results["images"]:,} images (95 % intervals over images):

| | | |
|:--|--:|:--|
{rows}

```python
from hf_captionrl import load_scorer

scorer = load_scorer("outputs/scorer/model")
```

It knows only what its captions say. Do not evaluate captions with the scorer that rewarded them. Its licence is that of the data and
of both parts.
"""


@alone_in_folder
def train(arguments: tuple[Any, ...]) -> Path:
    """Train the scorer, and measure it on the test split."""
    parts, data_args, config = arguments
    output_dir = Path(config.output_dir)
    set_seed(config.seed)  # initialises the projections
    model, processor = parts.load()
    splits = load_data(data_args, output_dir=output_dir)
    vision = model.vision_model.eval().to(config.device)
    settings = processor.image_processor.to_json_string()
    cache = FeatureCache(
        config.feature_cache_dir, model_id="vision_tower", revision=model_fingerprint(vision, settings), what="pooled"
    )

    @torch.no_grad()
    def encode(images: list[Any]) -> Tensor:
        pixels = processor.image_processor(images, return_tensors="pt")["pixel_values"]
        return tower_in_parts(lambda part: vision(part).pooler_output.flatten(1), pixels.to(config.device)).cpu()

    pairs = {name: Pairs(cached_features(cache, rows, encode), rows["captions"]) for name, rows in splits.items()}
    if getattr(model.config, "untrained", False):  # logits of unit scale, whatever the scale of the features
        scale = pairs["train"].features.tensor(slice(0, 1000)).float().square().mean().sqrt()
        torch.nn.init.normal_(model.visual_projection.weight, 0, 0.02 / max(float(scale), 1e-6))
        model.config.untrained = False
    config.output_dir = str(output_dir / "model")
    trainer = ScorerTrainer(
        parts,
        model,
        config,
        splits["train"],
        train_dataset=pairs["train"],
        eval_dataset=pairs["validation"],
        processing_class=processor,
    )
    train_or_resume(trainer)
    trainer.save_model()
    rank, own = trainer.caption_ranks(pairs["test"])
    results: dict[str, Any] = {"captions": len(rank), "images": len(pairs["test"]), "recall": {}}
    for k in KS:
        hits = (rank <= k).double().numpy()
        interval = proportion_interval(hits, groups=own.tolist())
        ends = {"low": interval[0], "high": interval[1], "method": interval.method}
        results["recall"][str(k)] = {"value": float(hits.mean())} | ends
    row = {f"recall_at_{k}": results["recall"][str(k)]["value"] for k in KS}
    results["rows"] = [{"name": "Scorer", **row}]
    description = describe_data(data_args, splits)
    results |= {"seed": config.seed, "data": description, "versions": installed_versions()}
    results["configuration"] = configuration_line(arguments)
    atomic_write_text(output_dir / "model" / "README.md", card(arguments, results, description))
    path = write_json(output_dir / "results.json", results)
    rows = [(k, results["recall"][str(k)]) for k in KS if k < len(pairs["test"])]
    print(", ".join(f"R@{k} {row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]" for k, row in rows))
    print(f"The scorer is in {output_dir / 'model'}.")
    return path


if __name__ == "__main__":
    run_main(main)
