"""Loads the tokenizer class of every checkpoint that README and docs/ name, from tiny files; a part of `make release-check`.

It runs in the environment that the installation of an archive made, so a class that needs a library which is no dependency
fails, with the checkpoints that cannot be loaded without it. A checkpoint that is not in `TOKENIZERS` fails, too.

    python scripts/load_tokenizers.py --model_types reproduction/results/model_types.json

instead loads a tiny model of every vision-to-text type of transformers, and writes what `load_captioner` says.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOKENIZERS = {
    "BertTokenizer": "Elron/bleurt-large-512 Salesforce/blip-image-captioning-base Salesforce/blip-image-captioning-large "
    "microsoft/git-base-coco",
    "CLIPTokenizer": "openai/clip-vit-base-patch32 openai/clip-vit-large-patch14",
    "GemmaTokenizer": "google/gemma-3-4b-it google/gemma-4-e2b-it google/paligemma-3b-mix-224",
    "GPT2Tokenizer": "HuggingFaceTB/SmolLM2-135M HuggingFaceTB/SmolLM2-135M-Instruct HuggingFaceTB/SmolVLM-256M-Instruct HuggingFaceTB/SmolVLM-Instruct "
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct Salesforce/blip2-opt-2.7b nlpconnect/vit-gpt2-image-captioning",
    "LlamaTokenizer": "Salesforce/instructblip-vicuna-7b llava-hf/llava-1.5-7b-hf llava-hf/llava-v1.6-mistral-7b-hf "
    "mistralai/Mistral-7B-Instruct-v0.2 mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "PreTrainedTokenizerFast": "HuggingFaceM4/Idefics3-8B-Llama3 LiquidAI/LFM2-VL-450M fancyfeast/llama-joycaption-beta-one-hf-llava "
    "meta-llama/Llama-3.2-11B-Vision-Instruct openbmb/MiniCPM-V-4.6 zai-org/GLM-4.1V-9B-Thinking",
    "Qwen2Tokenizer": "OpenGVLab/InternVL3_5-2B-HF Qwen/Qwen2-VL-2B-Instruct Qwen/Qwen2.5-3B-Instruct Qwen/Qwen2.5-VL-3B-Instruct "
    "Qwen/Qwen2.5-VL-7B-Instruct Qwen/Qwen3-VL-30B-A3B-Instruct Qwen/Qwen3-VL-4B-Instruct Qwen/Qwen3.5-27B allenai/Molmo2-8B "
    "llava-hf/llava-onevision-qwen2-7b-ov-hf",
    "RobertaTokenizer": "FacebookAI/roberta-large-mnli",
    "SiglipTokenizer": "google/siglip-base-patch16-224",
    "T5Tokenizer": "Salesforce/blip2-flan-t5-xl Salesforce/instructblip-flan-t5-xl",
    # Without a tokenizer, or refused because of the code in the checkpoint.
    "": "OpenGVLab/InternVL3_5-2B allenai/Molmo-7B-D-0924 google/efficientnet-b0 openbmb/MiniCPM-V-2_6 "
    "vikhyatk/moondream2",
}
_OWN = "claims|discritune|me|ndlb|outputs|photographs|sle|smile"  # owners of examples, and names of rows
_NAME = re.compile(rf"(?<![\w/.:~@-])(?!(?:{_OWN})/)([A-Za-z0-9-]+/[A-Za-z][\w.-]*[-\d][\w.-]*\w)(?![\w/])")
_FILE = re.compile(r"\.[a-z]+$")
_SPECIAL = "<unk> <pad> <s> </s> <bos> <eos> <|endoftext|> <|startoftext|>".split()
_TEXTS = ["a red cat and a dog on the grass"] * 8


def load(name: str, folder: Path) -> None:
    """Train a tiny tokenizer of a class, and load it as that of a checkpoint."""
    import transformers
    from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer

    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    vocabulary = getattr(transformers, name).vocab_files_names.get("vocab_file", "")
    if vocabulary.endswith(".model") and name != "PreTrainedTokenizerFast":
        import sentencepiece

        kind = "bpe" if name == "LlamaTokenizer" else "unigram"
        settings: dict[str, Any] = {"model_type": kind, "vocab_size": 26, "hard_vocab_limit": False, "minloglevel": 2}
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(_TEXTS), model_writer=written, **settings)
        (folder / vocabulary).write_bytes(written.getvalue())
    else:
        trained = BertWordPieceTokenizer() if vocabulary.endswith(".txt") else ByteLevelBPETokenizer()
        trained.train_from_iterator(_TEXTS, **({} if vocabulary.endswith(".txt") else {"special_tokens": _SPECIAL}))
        trained.save_model(str(folder))
        trained.save(str(folder / "tokenizer.json"))
    if not transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)("a red cat")["input_ids"]:
        raise ValueError("No ids.")


def main(root: Path = ROOT) -> int:
    """1 if a class cannot be loaded, or a page names a checkpoint that is not in the table."""
    known, faults = {name for names in TOKENIZERS.values() for name in names.split()}, []
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        names = {name for name in _NAME.findall(page.read_text(encoding="utf-8")) if not _FILE.search(name)}
        faults += [f"{page.name} names {name}. Add it to TOKENIZERS." for name in sorted(names - known)]
    for tokenizer, checkpoints in TOKENIZERS.items():
        try:
            with tempfile.TemporaryDirectory() as folder:
                load(tokenizer, Path(folder)) if tokenizer else None
        except Exception as error:  # whatever a class raises without its library
            faults.append(f"{tokenizer} of {checkpoints.replace(' ', ', ')} cannot be loaded: {error!r}")
    print(*faults, sep="\n")
    return int(bool(faults))


# --- Every vision-to-text type: a tiny model from the configuration of a related type ---------------------------------


class Relative:
    """`transformers`, whose classes of one model type are those of another one, where it has them."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def __getattr__(self, name: str) -> Any:
        import torch
        import transformers

        renamed = self.new + name[len(self.old) :] if name.startswith(self.old) else name
        chosen = getattr(transformers, renamed if hasattr(transformers, renamed) else name)

        def small(config: Any) -> Any:
            with torch.device("meta"):
                if chosen(config).num_parameters() > 3e6:
                    raise ValueError("The related configuration leaves this type large.")
            return chosen(config)

        return small if name.endswith("ForConditionalGeneration") else chosen


def result_of(kind: str) -> dict[str, str]:
    """`result` of a model type, with the related type or the `reason`."""
    import transformers

    from hf_captionrl.captioners import load_captioner
    from hf_captionrl.captioners.loading import _family_of, registered
    from tests.tiny import any_chat, chat

    if (family := registered(kind)) is not None:
        return {"result": "own family", "family": family.family}
    try:
        _family_of(transformers.AutoConfig.for_model(kind), kind)
    except ValueError as error:
        return {"result": "refused", "reason": str(error)}
    outcome = {"result": "no tiny configuration"}
    checked = any_chat.ANY_CHAT_TYPES
    for related in (kind,) if kind in checked else (*checked, *chat.CHAT_TYPES):
        prefixes = [transformers.CONFIG_MAPPING[n].__name__.removesuffix("Config") for n in (related, kind)]
        model: Any = None
        any_chat.transformers = chat.transformers = Relative(*prefixes)  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):  # whatever a class raises for a configuration of another one
            model, processor = (any_chat.tiny_any_chat if related in checked else chat.tiny_chat)(related)
        any_chat.transformers = chat.transformers = transformers  # type: ignore[attr-defined]
        if model is not None and model.config.model_type == kind:
            try:
                load_captioner(model, processor=processor)
                return {"result": "chat", "configuration_of": related}
            except Exception as error:
                if "differ from" in str(error):  # others only say that the configuration is not one of this type
                    outcome = {"result": "refused", "reason": str(error), "configuration_of": related}
    return outcome


def write_model_types(file: Path) -> None:
    """Write the result of every type of `AutoModelForImageTextToText`, and their numbers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    from hf_captionrl.utils.io import installed_versions, write_json

    types = {kind: result_of(kind) for kind in sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)}
    command = f"python scripts/load_tokenizers.py --model_types {file}"
    counts = dict(collections.Counter(entry["result"] for entry in types.values()))
    write_json(file, {"command": command, "versions": installed_versions(), "counts": counts, "types": types})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--model_types"]:
        sys.path.insert(0, str(ROOT))
        write_model_types(Path(sys.argv[2]))
    else:
        sys.exit(main())
