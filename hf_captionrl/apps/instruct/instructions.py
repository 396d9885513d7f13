"""Instructions with answers, and a LLaMA that is small enough to train on one CPU thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_captionrl.utils.io import read_jsonl

# --- Instructions with answers, in Alpaca's format, as prompts and completions ---------------------------------------

logger = logging.getLogger(__name__)

_MAX_BAD = 0.05  # share of rows without an instruction or an answer


def format_prompt(instruction: str, input: str = "") -> str:
    """The prompt that the answer continues. It ends in a line break, where no tokenizer merges prompt and answer."""
    middle = f"Input: {input.strip()}\n" if input.strip() else ""
    return f"Instruction: {instruction.strip()}\n{middle}Answer:\n"


def to_prompts(rows: datasets.Dataset) -> datasets.Dataset:
    """Alpaca's columns as trl's prompt and completion."""
    missing = [column for column in ("instruction", "output") if column not in rows.column_names]
    if missing:
        raise ValueError(
            f"The instructions have no column {missing[0]!r}; there are {rows.column_names}. Alpaca's format is "
            "instruction, input (may be missing) and output."
        )
    columns = ("instruction", "input", "output")
    texts = [{name: (row.get(name) or "").strip() for name in columns} for row in rows]
    filled = [text for text in texts if text["instruction"] and text["output"]]
    bad = len(rows) - len(filled)
    if bad > _MAX_BAD * len(rows) or not filled:
        raise ValueError(
            f"{bad} of {len(rows)} rows have a blank instruction or output, more than {_MAX_BAD:.0%}. Check the file."
        )
    if bad:
        logger.warning("%d of %d rows have a blank instruction or output and are left out.", bad, len(rows))
    return datasets.Dataset.from_list(
        [{"prompt": format_prompt(t["instruction"], t["input"]), "completion": t["output"]} for t in filled]
    )


def load_instructions(
    name: str | os.PathLike[str], *, max_rows: int | None = None, exclude: Sequence[str] = ()
) -> datasets.Dataset:
    """Load instructions from a JSON Lines or Parquet file, or from the Hub."""
    path = Path(name)
    if path.suffix == ".parquet":
        rows = datasets.Dataset.from_parquet(str(path))
    elif path.suffix == ".jsonl":
        rows = datasets.Dataset.from_list([row for _, row in read_jsonl(path)])
    else:
        rows = datasets.load_dataset(str(name), split="train")
    if max_rows is not None:
        rows = rows.select(range(min(max_rows, len(rows))))
    prompts, excluded = to_prompts(rows), set(exclude)
    return prompts.filter(lambda row: row["prompt"] not in excluded) if excluded else prompts


# --- A LLaMA that is small enough to train on one CPU thread, with random weights and a small tokenizer --------------

TINY_LLAMA = "tiny-llama"  # model name that selects it in a recipe


def tiny_llama(
    texts: Iterable[str], *, vocab_size: int = 1024, width: int = 64, layers: int = 2, seed: int = 0
) -> tuple[Any, Any]:
    """A LLaMA with random weights, and a byte-level BPE tokenizer of 259 to `vocab_size` tokens, trained on the texts."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **special)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return model, tokenizer
