"""Create a small captioner with BLIP-base's architecture, random weights and a WordPiece vocabulary of your captions.

    python scripts/make_small_blip.py --metadata photos/metadata.jsonl --output_dir outputs/small-blip

Use it to try a recipe on photographs without downloading a checkpoint. Everything except the size equals
Salesforce/blip-image-captioning-base. The model is untrained.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer, BlipConfig, BlipForConditionalGeneration, BlipImageProcessor, BlipProcessor

from hf_captionrl.utils.io import read_jsonl

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", "[ENC]"]


def make_small_blip(
    captions: list[str], *, hidden_size: int = 96, num_layers: int = 2, image_size: int = 96, seed: int = 0
) -> tuple[BlipForConditionalGeneration, BlipProcessor]:
    """Build model and processor."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.train_from_iterator(captions, trainers.WordPieceTrainer(vocab_size=30_522, special_tokens=SPECIAL))
    tokenizer = BertTokenizer(vocab=pieces.get_vocab(), do_lower_case=True, model_max_length=512)
    tokenizer.add_special_tokens({"bos_token": "[DEC]", "additional_special_tokens": ["[ENC]"]})
    shared = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size, "num_hidden_layers": num_layers}
    end = tokenizer.sep_token_id
    config = BlipConfig(
        text_config={
            **shared,
            "num_attention_heads": 12,
            "vocab_size": len(tokenizer),
            "encoder_hidden_size": hidden_size,
            "max_position_embeddings": 512,
            "bos_token_id": tokenizer.convert_tokens_to_ids("[DEC]"),
            "eos_token_id": end,
            "sep_token_id": end,
            "pad_token_id": tokenizer.pad_token_id,
        },
        # A model with BLIP's initializer_range of 1e-10 cannot be trained from scratch.
        vision_config={
            **shared,
            "num_attention_heads": 12,
            "image_size": image_size,
            "patch_size": 16,
            "initializer_range": 0.02,
        },
    )
    torch.manual_seed(seed)
    image_processor = BlipImageProcessor(size={"height": image_size, "width": image_size})
    return BlipForConditionalGeneration(config), BlipProcessor(image_processor, tokenizer)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metadata", type=Path, required=True, help="metadata.jsonl with a column `captions`.")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--hidden_size", type=int, default=96)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--image_size", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = [row for _, row in read_jsonl(args.metadata)]
    captions = [
        c for row in rows for c in ([row["captions"]] if isinstance(row["captions"], str) else row["captions"])
    ]
    model, processor = make_small_blip(
        captions,
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        image_size=args.image_size,
        seed=args.seed,
    )
    model.save_pretrained(args.output_dir)
    processor.save_pretrained(args.output_dir)
    print(
        f"{args.output_dir}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(processor.tokenizer)} tokens"
    )


if __name__ == "__main__":
    main()
