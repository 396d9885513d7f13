r"""Tokens per second and memory of a LoRA step with SMILE for text, beside the step of TRL's `SFTTrainer`.

All trainers hold one LLaMA of one shape with a 128k vocabulary, and take turns in one process on one thread with the
same packed batches; times are CPU seconds of this process.

Legend: B rows of a batch, T tokens of a row, V vocabulary.
"""

import argparse
import copy
import dataclasses
import gc
import itertools
import statistics
import tempfile
import time
from typing import Any

import datasets
import numpy as np
import torch

from hf_captionrl.losses import IGNORE_INDEX
from hf_captionrl.metrics.table import installed_versions
from scripts.benchmarks.allocations import allocations
from scripts.benchmarks.shapes_file import measure_shapes
from scripts.benchmarks.smile_step import _with_interval
from scripts.machine_facts import processor_name

PATHS: dict[str, dict[str, Any] | None] = {
    "smile": {},
    "smile-sentence": {"subset_scope": "sentence"},
    "smile-window": {"subset_scope": "window", "window_tokens": 32},
    "mixture": {"mle_weight": 0.01},
    "trl": None,
}
"""Settings of `SmileSFTConfig` for each path; None for TRL's trainer."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and a batch."""

    width: int  # of the hidden states
    layers: int
    vocab_size: int = 128_256
    rows: int = 2  # B, packed rows of a batch
    tokens: int = 256  # T, most tokens of a row


SHAPES = {
    "tiny": Shape(width=256, layers=4),
    "small": Shape(width=1024, layers=8),
}
"""LLaMA 3's vocabulary behind 4 and 8 blocks; Llama-3.2-1B has 16 blocks of width 2048."""

_END, _POINT = 2, 5  # token ids
_PROMPT = 20
"""Tokens of each prompt; those of the answers vary, 65 on average as Alpaca's."""


def _documents(shape: Shape, number: int, seed: int) -> datasets.Dataset:
    """Prompts and answers as token ids: Zipf's frequencies, a sentence's end every 15 tokens or so."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in np.clip(rng.gamma(1.5, 43.0, number), 4, shape.tokens - _PROMPT - 1).astype(int):
        words = 8 + np.exp(rng.uniform(0, np.log(shape.vocab_size - 8), _PROMPT + length)).astype(int) - 1
        words[_PROMPT:][rng.random(length) < 1 / 15] = _POINT
        ids = [*words.tolist(), _END]
        rows.append({"input_ids": ids, "labels": [IGNORE_INDEX] * _PROMPT + ids[_PROMPT:]})
    return datasets.Dataset.from_list(rows)


def _tokenizer() -> Any:
    """Knows only what the trainers ask of it: a padding token, an end, and a point that ends sentences."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": _END, "<unk>": 3, ",": 4, ".": _POINT, "a": 6, "b": 7}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def build_trainers(shape: Shape, seed: int, folder: str, number: int) -> dict[str, Any]:
    """One trainer per path, all with the same weights and data.

    Returns the trainers by name of the path, on the CPU in fp32, without activation checkpointing.
    """
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTTrainer

    from hf_captionrl.trainers.trl_smile_sft import SmileSFTConfig, SmileSFTTrainer

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.width,
        intermediate_size=4 * shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=max(shape.width // 64, 1),
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=_END,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    trainers = {}
    for name, settings in PATHS.items():
        args = SmileSFTConfig(
            folder,
            per_device_train_batch_size=shape.rows,
            packing=True,
            max_length=shape.tokens,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            dataloader_pin_memory=False,
            **(settings or {}),
        )
        trainers[name] = (SFTTrainer if settings is None else SmileSFTTrainer)(
            # Base weights are frozen, so that all models can share them; each has other adapters.
            copy.deepcopy(model, memo={id(weight): weight for weight in model.parameters()}),
            args,
            train_dataset=_documents(shape, number, seed),
            processing_class=_tokenizer(),
            peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        )
        trainers[name].model.train()
    return trainers


def _step(trainer: Any, batch: dict[str, Any], optimizer: Any) -> float:
    """CPU seconds of forward, backward and optimizer."""
    started = time.process_time()
    number = (batch["labels"][:, 1:] != IGNORE_INDEX).sum()
    trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=number).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.process_time() - started


def _peak_bytes(trainer: Any, batch: dict[str, Any], optimizer: Any) -> int:
    """Most bytes that a step holds at once beyond what it found, in torch's allocator."""
    return max(0, *itertools.accumulate(allocations(lambda: _step(trainer, batch, optimizer))))


def measure(shape: Shape, *, seed: int = 0, repetitions: int = 6) -> dict[str, Any]:
    """Time the steps of all paths in turn.

    Returns `tokens_per_second` of each path (all tokens of the rows, supervised or not), `speedup` of each over TRL
    within a batch, `peak_mib` beyond weights and optimizer, and what was measured.
    """
    names = list(PATHS)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    tokens, supervised = [], []
    with tempfile.TemporaryDirectory() as folder:
        trainers = build_trainers(shape, seed, folder, number=8 * shape.rows * (repetitions + 2))
        weights = {n: [p for p in t.model.parameters() if p.requires_grad] for n, t in trainers.items()}
        optimizers = {n: torch.optim.AdamW(w, lr=1e-7) for n, w in weights.items()}
        batches = iter(trainers["trl"].get_train_dataloader())
        first = next(batches)
        difference = _loss_difference(trainers, first)
        peak = {name: _peak_bytes(trainers[name], first, optimizers[name]) / 2**20 for name in names}
        for repetition in range(repetitions):
            batch = next(batches)
            tokens.append(batch["labels"].numel())
            supervised.append(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()))
            shift = (repetition + seed) % len(names)
            gc.collect()
            for name in names[shift:] + names[:shift]:
                seconds[name].append(_step(trainers[name], batch, optimizers[name]))
    return {
        "shape": dataclasses.asdict(shape),
        "parameters": sum(p.numel() for p in trainers["trl"].model.parameters()),
        "trained_parameters": sum(p.numel() for p in weights["trl"]),
        "median_tokens": statistics.median(tokens),
        "median_supervised_tokens": statistics.median(supervised),
        "repetitions": repetitions,
        "seed": seed,
        "tokens_per_second": {
            n: statistics.median(t / s for t, s in zip(tokens, taken, strict=True)) for n, taken in seconds.items()
        },
        "speedup_over_trl": {
            name: _with_interval([trl / own for own, trl in zip(seconds[name], seconds["trl"], strict=True)])
            for name in names
            if name != "trl"
        },
        "peak_mib": peak,
        "loss_difference": difference,
        "processor": processor_name(),
        "versions": installed_versions(),
    }


def _loss_difference(trainers: dict[str, Any], batch: dict[str, Any]) -> float:
    """The package's path at lambda just below 1 against TRL's loss, in nats."""
    config = trainers["mixture"].args
    previous, config.mle_weight = config.mle_weight, 1 - 1e-9
    try:
        with torch.no_grad():
            own, trl = (float(trainers[n].compute_loss(trainers[n].model, dict(batch))) for n in ("mixture", "trl"))
    finally:
        config.mle_weight = previous
    if not abs(own - trl) <= 1e-3:
        raise RuntimeError(f"The losses are {own:.6f} and {trl:.6f}, and should be the same. Run the trainer's tests.")
    return abs(own - trl)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this benchmark."""
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="Which models to train.")
    parser.add_argument("--repetitions", type=int, default=10, help="Batches that every path trains on.")
    parser.add_argument("--seed", type=int, default=0, help="Of weights and data.")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time the steps. Returns for each shape what [`measure`] returns."""
    return measure_shapes(args, lambda name: measure(SHAPES[name], seed=args.seed, repetitions=args.repetitions))


def markdown(result: dict[str, Any]) -> str:
    """Write the result as a section of docs/benchmarks.md."""
    shapes = {name: result["shapes"][name] for name in SHAPES if name in result["shapes"]}
    lines = [
        "## `smile_sft`: SMILE for text with LoRA, compared with TRL",
        "",
        "`python scripts/benchmark.py smile_sft`: forward, backward and AdamW of a LoRA (r 8, queries and values) in "
        "fp32 on one thread, random weights, documents of Alpaca's lengths packed into rows. All trainers alternate "
        "in one process on the same batches. Tokens are all tokens of the rows. Speedups are ratios of CPU-seconds "
        "within a batch, above 1 if the path is faster than `trl.SFTTrainer`: median [quartiles], then an interval "
        "of the median (95 % from 6 batches on). Peak memory is that of torch's allocator during a step, without "
        "weights and optimizer.",
        "",
        "| shape | path | tokens per second | over trl | interval | peak memory | batches |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, measured in shapes.items():
        size = measured["shape"]
        title = (
            f"{name} (D {size['width']}, {size['layers']} blocks, V {size['vocab_size']}, "
            f"{measured['median_supervised_tokens']:.0f} of {measured['median_tokens']:.0f} tokens supervised)"
        )
        for path in PATHS:
            over, interval = "1", ""
            if path != "trl":
                ratio = measured["speedup_over_trl"][path]
                low, high = ratio["quartiles"]
                over = f"{ratio['median']:.2f} [{low:.2f}, {high:.2f}]"
                interval = "{:.2f} to {:.2f}".format(*ratio["interval_95"])
            lines.append(
                f"| {title} | {path} | {measured['tokens_per_second'][path]:.0f} | {over} | {interval} | "
                f"{measured['peak_mib'][path]:.0f} MiB | {measured['repetitions']} |"
            )
    versions = next(iter(shapes.values()))["versions"]
    lines += [
        "",
        f"{next(iter(shapes.values()))['processor']}, torch {versions['torch']}. On a CPU, `trl` computes logits for "
        "every position, supervised or not; on a GPU its kernel does so only for supervised positions, so the ratios there "
        "will differ. The mixture (lambda = 0.01) uses the whole vocabulary for the supervised tokens; the difference "
        "between smile and mixture is therefore the saving of the subset itself.",
    ]
    return "\n".join(lines)
