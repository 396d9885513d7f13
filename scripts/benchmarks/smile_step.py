r"""How long a whole training step takes with SMILE: forward, backward and optimizer, beside the MLE step.

Both steps train one model on one batch, in turn in one process on one thread, so that a busy machine slows both; times
are CPU seconds of this process. Every repetition draws a batch of its own and takes the paths in another order. Weights
and images are random, and captions have the lengths of COCO's: none of it changes how long a step takes.

Legend: B captions, T tokens, V vocabulary, D features, P prefix embeddings.
"""

import argparse
import dataclasses
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BlipConfig,
    BlipForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from hf_captionrl.captioners import Captioner
from hf_captionrl.captioners.blip import BlipCaptioner
from hf_captionrl.captioners.encoder_decoder import EncoderDecoderCaptioner
from hf_captionrl.captioners.head import tap_head
from hf_captionrl.io import write_json
from hf_captionrl.losses import IGNORE_INDEX, smile_loss
from hf_captionrl.reports.versions import installed_versions
from hf_captionrl.trainers.smile_trainer import SmileObjective

__all__ = ["PATHS", "SHAPES", "PrefixGPT2", "Shape", "add_arguments", "build", "check_losses", "draw_batch", "measure", "run"]  # fmt: skip

# Words and marks a caption, counted in the 25,010 captions of COCO's Karpathy test split: 11.3 on average.
_LENGTHS = {7: 106, 8: 1277, 9: 4226, 10: 5211, 11: 4879, 12: 3546, 13: 2187, 14: 1319, 15: 842, 16: 462, 17: 314,
            18: 193, 19: 126, 20: 73, 22: 93, 24: 83, 27: 63}  # fmt: skip
_RESERVED = 8
"""Token ids below it are kept for start, end and padding."""
_START, _END, _PAD = 1, 2, 0


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and a batch.

    Args:
        kind (`str`): `"blip"`, `"vit-gpt2"`, `"llama"` (text only) or `"clipcap"` (GPT-2 behind cached features).
        batch_size (`int`): B.
        vocab_size (`int`): V.
        width (`int`): D, of the text model and of the image tower.
        layers (`int`): Of the text model, and of the image tower where there is one.
        heads (`int`): Of attention.
        intermediate (`int`): Width of the feed-forward layers.
        image_size (`int`): Side in pixels; patches are 16 wide.
        prefix_length (`int`): P, of `"clipcap"`.
        frozen (`bool`): Train only what stands in front of the language model of `"clipcap"`.
    """

    kind: str
    batch_size: int
    vocab_size: int
    width: int = 768
    layers: int = 12
    heads: int = 12
    intermediate: int = 3072
    image_size: int = 224
    prefix_length: int = 0
    frozen: bool = False


SHAPES = {
    "blip-base": Shape("blip", 4, 30_524),
    "vit-gpt2": Shape("vit-gpt2", 4, 50_257),
    "llama-32k": Shape("llama", 8, 32_000, width=4096, layers=1, heads=32, intermediate=11_008),
    "clipcap": Shape("clipcap", 40, 50_257, prefix_length=10),
    "clipcap-frozen": Shape("clipcap", 40, 50_257, prefix_length=10, frozen=True),
}
"""What is measured. `clipcap` trains GPT-2 and the mapping network, `clipcap-frozen` the mapping network only."""

_FEATURES = 512
"""Width of the cached features, that of CLIP ViT-B/32."""


class PrefixGPT2(GPT2LMHeadModel):
    """GPT-2 that reads P embeddings, made from one feature vector an image by ClipCap's two-layer network, before text.

    Reference: Mokady et al. 2021, "ClipCap: CLIP Prefix for Image Captioning".

    Args:
        config (`GPT2Config`): Of GPT-2.
        prefix_length (`int`): P.
    """

    def __init__(self, config: Any, prefix_length: int) -> None:
        super().__init__(config)
        width = config.n_embd * prefix_length
        self.prefix_length = prefix_length
        self.mapping = nn.Sequential(nn.Linear(_FEATURES, width // 2), nn.Tanh(), nn.Linear(width // 2, width))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        prefix_features: Tensor,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """GPT-2's own forward behind the prefix.

        Args:
            input_ids (`torch.Tensor` of shape `(B, T)`): Start token, caption, end token.
            attention_mask (`torch.Tensor` of shape `(B, T)`): Of the text.
            prefix_features (`torch.Tensor` of shape `(B, 512)`): One an image.
            labels (`torch.Tensor` of shape `(B, T)`, *optional*): Not shifted.
            kwargs (`Any`): For GPT-2.

        Returns:
            GPT-2's output, over P + T positions.
        """
        prefix = self.mapping(prefix_features).view(len(input_ids), self.prefix_length, -1)  # (B, P, D)
        before = (self.prefix_length, 0)
        if labels is not None:
            labels = F.pad(labels, before, value=IGNORE_INDEX)
        return super().forward(
            inputs_embeds=torch.cat([prefix, self.transformer.wte(input_ids)], 1),
            attention_mask=F.pad(attention_mask, before, value=1),
            labels=labels,
            **kwargs,
        )


class _TextFirst(Captioner):
    """Enough of a family for the tap where no module of the model reads pixels."""

    family = "text"


def build(shape: Shape, seed: int) -> Any:
    """A randomly initialised model with the package's tap, in training mode.

    Args:
        shape ([`Shape`]): Which one.
        seed (`int`): Of its weights.

    Returns:
        `PreTrainedModel`: Its forward takes `head_objective`.

    Raises:
        ValueError: If the kind is unknown.
    """
    torch.manual_seed(seed)
    tower = {
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.intermediate,
    }
    # BLIP's default, 1e-10, makes denormal numbers, which a CPU is slow at and no trained model has.
    vision = {**tower, "image_size": shape.image_size, "patch_size": 16, "initializer_range": 0.02}
    special = {"bos_token_id": _START, "eos_token_id": _END, "pad_token_id": _PAD}
    gpt2 = GPT2Config(
        vocab_size=shape.vocab_size,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.intermediate,
        **special,
    )
    model: Any
    family: type[Captioner] = _TextFirst
    if shape.kind == "blip":
        text = {**tower, **special, "encoder_hidden_size": shape.width, "vocab_size": shape.vocab_size}
        model = BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=vision))
        family = BlipCaptioner
    elif shape.kind == "vit-gpt2":
        joined = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            ViTConfig(**vision), gpt2, decoder_start_token_id=_START, pad_token_id=_PAD, eos_token_id=_END
        )
        model = VisionEncoderDecoderModel(joined)
        family = EncoderDecoderCaptioner
    elif shape.kind == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(**tower, **special, vocab_size=shape.vocab_size, tie_word_embeddings=False)
        )
    elif shape.kind == "clipcap":
        model = PrefixGPT2(gpt2, shape.prefix_length)
        model.requires_grad_(not shape.frozen)
        model.mapping.requires_grad_(True)
    else:
        raise ValueError(f"kind ({shape.kind!r}) must be 'blip', 'vit-gpt2', 'llama' or 'clipcap'.")
    tap_head(model, family)
    return model.train()


def draw_batch(shape: Shape, rng: np.random.Generator) -> dict[str, Tensor]:
    """Captions of COCO's lengths, padded to the longest, with random images or features.

    Args:
        shape ([`Shape`]): For which model.
        rng (`numpy.random.Generator`): Where it is drawn from.

    Returns:
        `dict`: The inputs of the model's forward, labels among them, as the package's `collate` makes them.
    """
    counts = np.array(list(_LENGTHS.values()))
    lengths = rng.choice(list(_LENGTHS), shape.batch_size, p=counts / counts.sum())  # (B,)
    input_ids = np.full((shape.batch_size, lengths.max() + 2), _PAD)  # (B, T)
    input_ids[:, 0] = _START
    for row, length in zip(input_ids, lengths, strict=True):
        # Word k of a language is about 1/k as frequent as the first: about one word of a caption occurs in it twice.
        words = np.exp(rng.uniform(0, math.log(shape.vocab_size - _RESERVED), length)).astype(np.int64) - 1
        row[1 : length + 1] = _RESERVED + words
        row[length + 1] = _END
    positions = np.arange(input_ids.shape[1])
    mask = positions < lengths[:, None] + 2  # (B, T)
    labels = np.where(mask & (positions > 0), input_ids, IGNORE_INDEX)
    batch = {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(mask.astype(np.int64)),
        "labels": torch.from_numpy(labels),
    }
    if shape.kind in ("blip", "vit-gpt2"):
        size = (shape.batch_size, 3, shape.image_size, shape.image_size)
        batch["pixel_values"] = torch.from_numpy(rng.standard_normal(size, dtype=np.float32))
    elif shape.kind == "clipcap":
        features = rng.standard_normal((shape.batch_size, _FEATURES), dtype=np.float32)
        batch["prefix_features"] = torch.from_numpy(features)
    return batch


def _through_tap(mle_weight: float) -> Callable[[Any, dict[str, Tensor]], Tensor]:
    """The loss of `SmileTrainer`: the objective's sum over the supervised tokens, divided by their number."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        output = model(**batch, head_objective=SmileObjective(mle_weight=mle_weight))
        return output["loss"] / (batch["labels"] != IGNORE_INDEX).sum()

    return loss


def _own_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


PATHS: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {
    "smile": _through_tap(0.0),
    "mle": _own_loss,
    "mle-tapped": _through_tap(1.0),
}
"""From model and batch to the loss: SMILE and MLE through the package's tap, and `mle`, the model's own forward and loss
over full logits."""


def check_losses(model: Any, batch: dict[str, Tensor], atol: float = 1e-3) -> dict[str, float]:
    """Make sure that the paths compute what they are named after, from full logits and without dropout.

    Args:
        model (`PreTrainedModel`): Of [`build`].
        batch (`dict`): Of [`draw_batch`].
        atol (`float`): Largest difference in nats.

    Returns:
        `dict[str, float]`: The difference for each path.

    Raises:
        RuntimeError: If a difference exceeds `atol`.
    """
    model.eval()
    try:
        with torch.no_grad():
            losses = {name: float(path(model, batch)) for name, path in PATHS.items()}
            labels = batch["labels"][:, 1:]
            # The encoder-decoder reads the tokens without the last one; the others' last position predicts nothing.
            logits = model(**batch).logits
            logits = logits if model.config.is_encoder_decoder else logits[:, -labels.size(1) - 1 : -1]
            mle = float(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
            expected = {"smile": float(smile_loss(logits, labels)), "mle": mle, "mle-tapped": mle}
    finally:
        model.train()
    differences = {name: abs(losses[name] - expected[name]) for name in PATHS}
    for name, difference in differences.items():
        if not difference <= atol:
            raise RuntimeError(
                f"The loss of path {name!r} is {losses[name]:.6f}, but {expected[name]:.6f} from full logits: a time "
                "would say nothing. Compare the captioner's tap with the model's own loss (Captioner.self_check)."
            )
    return differences


def _timed_step(path: Callable[..., Tensor], model: Any, batch: dict[str, Tensor], optimizer: Any) -> list[float]:
    """CPU seconds of forward, backward and optimizer."""
    gc.collect()
    times = [time.process_time()]
    loss = path(model, batch)
    times.append(time.process_time())
    loss.backward()
    del loss
    times.append(time.process_time())
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    times.append(time.process_time())
    return np.diff(times).tolist()


def _median_interval(values: list[float], level: float = 0.95) -> list[float]:
    """Order statistics between which the median lies with at least `level`; all values where they are few."""
    n, tail, rank = len(values), 0.0, 0
    while rank < n // 2 and (tail := tail + math.comb(n, rank) / 2**n) <= (1 - level) / 2:
        rank += 1
    rank = max(rank - 1, 0)
    ordered = sorted(values)
    return [ordered[rank], ordered[n - 1 - rank]]


def _summary(values: list[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "quartiles": np.quantile(values, [0.25, 0.75]).tolist(),
        "interval_95": _median_interval(values),
        "values": values,
    }


def measure(shape: Shape, *, seeds: Iterable[int] = (0, 1, 2), repetitions: int = 3) -> dict[str, Any]:
    """Time the steps of all paths in turn.

    Args:
        shape ([`Shape`]): Model and batch.
        seeds (`Iterable[int]`): A model for each.
        repetitions (`int`): Batches a seed, each of which every path trains on.

    Returns:
        `dict`: `seconds` of each path (median of the step and of its parts), `speedup` of SMILE over each other path
            (median, quartiles, interval of the median and value of each repetition), and what was measured.

    Raises:
        RuntimeError: If a path computes another loss than it should.
    """
    names = list(PATHS)
    steps: dict[str, list[list[float]]] = {name: [] for name in names}
    tokens, positions = [], []
    differences = dict.fromkeys(names, 0.0)
    parameters = trained = 0
    for seed in seeds:
        model = build(shape, seed)
        rng = np.random.default_rng(seed)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        parameters, trained = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in weights)
        # The Trainer's default optimizer, at a rate that leaves the model as it is.
        optimizer = torch.optim.AdamW(weights, lr=1e-7, fused=True)
        batch = draw_batch(shape, rng)
        for name, difference in check_losses(model, batch).items():
            differences[name] = max(differences[name], difference)
        for name in names:  # makes the optimizer's state
            _timed_step(PATHS[name], model, batch, optimizer)
        for repetition in range(repetitions):
            batch = draw_batch(shape, rng)
            tokens.append(int((batch["labels"] != IGNORE_INDEX).sum()))
            positions.append(batch["labels"].size(1))
            shift = (repetition + seed) % len(names)
            for name in names[shift:] + names[:shift]:
                steps[name].append(_timed_step(PATHS[name], model, batch, optimizer))
        del model, optimizer, weights
        gc.collect()
    totals = {name: [sum(step) for step in taken] for name, taken in steps.items()}
    seconds = {
        name: {
            "step": statistics.median(totals[name]),
            **dict(
                zip(("forward", "backward", "optimizer"), np.median(np.array(steps[name]), axis=0).tolist(), strict=True)
            ),
        }
        for name in names
    }
    return {
        "shape": dataclasses.asdict(shape),
        "parameters": parameters,
        "trained_parameters": trained,
        "median_text_positions": statistics.median(positions),
        "median_supervised_tokens": statistics.median(tokens),
        "repetitions": len(tokens),
        "seconds": seconds,
        "speedup": {
            f"over_{name}": _summary([b / a for a, b in zip(totals["smile"], totals[name], strict=True)])
            for name in names
            if name != "smile"
        },
        "largest_loss_difference": differences,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark.

    Args:
        parser (`argparse.ArgumentParser`): The parser to extend.
    """
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="Which models to train.")
    parser.add_argument("--repetitions", type=int, default=3, help="Batches a seed that every path trains on.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="A model for each.")
    parser.add_argument("--batch-size", type=int, default=None, help="Captions a batch, in place of the shape's own.")
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        help="JSON file to write, such as docs/results/benchmark_smile_step.json; other shapes in it are kept.",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time the steps.

    Args:
        args (`argparse.Namespace`): What the parser of [`add_arguments`] gave.

    Returns:
        `dict`: For each shape what [`measure`] returns, with the seeds and versions.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    shapes: dict[str, Any] = {}
    if args.output is not None and args.output.exists():
        shapes = json.loads(args.output.read_text(encoding="utf-8"))["shapes"]
    result: dict[str, Any] = {"shapes": shapes}
    try:
        for name in args.shapes:
            shape = SHAPES[name]
            if args.batch_size is not None:
                shape = dataclasses.replace(shape, batch_size=args.batch_size)
            measured = measure(shape, seeds=args.seeds, repetitions=args.repetitions)
            shapes[name] = measured | {"seeds": list(args.seeds), "versions": installed_versions()}
            if args.output is not None:
                write_json(args.output, result)
    finally:
        torch.set_num_threads(threads)
    return result


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(_parser)
    print(json.dumps(run(_parser.parse_args()), indent=2))
