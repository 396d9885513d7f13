"""Scorers from open_clip.

Legend: N captions, B images, T tokens, D features.
"""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from hf_captionrl.retrieval.feature_cache import model_fingerprint, tower_in_parts
from hf_captionrl.retrieval.scorer import DualEncoder
from hf_captionrl.utils.model_files import convert_command


class OpenClipScorer(DualEncoder):
    """Scorer from an open_clip model; the other arguments are those of `HFScorer`."""

    def __init__(
        self,
        name_or_model: Any,  # an architecture, "hf-hub:org/repo", a folder with open_clip_config.json, or a model in memory
        pretrained: str | None = None,  # tag of released weights ("openai"), or a file of weights in safetensors
        *,
        tokenizer: Any = None,  # None: that of the model; CLIP's BPE for a model in memory
        preprocess: Any = None,  # from a PIL image to a tensor; None: by the settings of the model
        dtype: str | torch.dtype = "float32",
        device: str | torch.device | None = None,
        batch_size: int = 64,
    ):
        import open_clip
        from open_clip.transform import PreprocessCfg, image_transform_v2

        if isinstance(name_or_model, torch.nn.Module):
            model, model_id = name_or_model, f"open_clip:{type(name_or_model).__name__}"
            device = device if device is not None else next(model.parameters()).device
        else:
            model, model_id, name = _open_clip_model(os.fspath(name_or_model), pretrained)
            tokenizer = tokenizer if tokenizer is not None else open_clip.get_tokenizer(name)
        self.context_length = int(model.context_length)
        if tokenizer is None:
            tokenizer = open_clip.SimpleTokenizer(context_length=self.context_length)
            if (vocab := getattr(model, "vocab_size", None)) != tokenizer.vocab_size:
                clip = tokenizer.vocab_size
                raise ValueError(f"The model has a vocabulary of {vocab}, but CLIP's has {clip}. Pass tokenizer=.")
        self.tokenizer = tokenizer
        settings = dict(open_clip.get_model_preprocess_cfg(model))
        self.preprocess = preprocess or image_transform_v2(PreprocessCfg(**settings), is_train=False)
        heads = [module.num_heads for module in model.modules() if hasattr(module, "num_heads")]
        # The model has no config; its repr contains what the weights do not determine (activations, norms).
        fingerprint = model_fingerprint(model, json.dumps(settings, default=str), repr(model), str(heads))
        # Causal towers can process fewer positions, while open_clip's forward always processes all of them.
        self._trim = (
            type(model) is open_clip.CLIP
            and model.attn_mask is not None
            and model.text_pool_type in ("argmax", "eos")
            and isinstance(tokenizer, open_clip.SimpleTokenizer)
        )
        super().__init__(
            model,
            model_id=model_id,
            fingerprint=fingerprint,
            logit_scale=float(model.logit_scale.detach().double().exp()),
            max_text_tokens=self.context_length,
            dtype=dtype,
            device=device,
            batch_size=batch_size,
            extra=(f"open_clip:{open_clip.__version__}",),
        )
        if self._trim:
            probe = self.tokenizer(["a"], context_length=self.context_length)[0]
            eos = self.tokenizer.eot_token_id if model.text_pool_type == "argmax" else model.text_eos_id
            if int((probe == eos).sum()) != 1 or int(probe[2]) != eos:
                ends = f"but the tokenizer ends a caption with {int(probe[2])}"
                raise ValueError(f"The text tower pools at token {eos}, {ends}. Set text_cfg.eos_id to that.")

    def _num_tokens(self, captions: list[str]) -> list[int]:
        if hasattr(self.tokenizer, "encode"):
            return [len(self.tokenizer.encode(caption)) + 2 for caption in captions]
        # Other tokenizers always truncate and pad. With one token per byte nothing is truncated, and a caption ends at
        # the first end token, or at the padding token if they are the same; a row may also begin with this token.
        inner = getattr(self.tokenizer, "tokenizer", None)
        ends = {getattr(inner, "eos_token_id", None), getattr(inner, "sep_token_id", None)}
        ends.add(getattr(inner, "pad_token_id", 0))
        room = max(len(caption.encode()) for caption in captions) + 8
        rows = self.tokenizer(captions, context_length=max(room, self.max_text_tokens + 1)).tolist()
        return [next((i for i, token in enumerate(row) if i and token in ends), len(row) - 1) + 1 for row in rows]

    def _tokenize(self, captions: list[str]) -> list[dict[str, list[int]]]:
        # (N, context); EOS is kept in truncated captions
        tokens = self.tokenizer(captions, context_length=self.context_length)
        if not self._trim:
            return [{"input_ids": row} for row in tokens.tolist()]
        eos = self.tokenizer.eot_token_id
        ends = [int((row == eos).nonzero()[-1, 0]) + 1 for row in tokens]
        return [{"input_ids": row[:end].tolist()} for row, end in zip(tokens, ends, strict=True)]

    def _padded(self, rows: list[dict[str, list[int]]]) -> Tensor:
        longest = max(len(row["input_ids"]) for row in rows)
        tokens = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
        return tokens.to(self.device)  # (N, T)

    def _hidden(self, tokens: Tensor) -> Tensor:
        model, longest = self.model, tokens.shape[1]
        x = model.token_embedding(tokens) + model.positional_embedding[:longest]
        return model.ln_final(model.transformer(x, attn_mask=model.attn_mask[:longest, :longest]))  # (N, T, width)

    def _project(self, x: Tensor) -> Tensor:
        projection = self.model.text_projection
        if projection is None:
            return x
        return projection(x) if isinstance(projection, torch.nn.Module) else x @ projection

    def _encode_text(self, rows: list[dict[str, list[int]]]) -> Tensor:
        tokens = self._padded(rows)
        if not self._trim:
            return self.model.encode_text(tokens)
        from open_clip.transformer import text_global_pool

        pool, eos = self.model.text_pool_type, self.model.text_eos_id
        return self._project(text_global_pool(self._hidden(tokens), tokens, pool, eos_token_id=eos))

    def _encode_tokens(self, rows: list[dict[str, list[int]]]) -> Tensor:
        return self._project(self._hidden(self._padded(rows))) if self._trim else super()._encode_tokens(rows)

    def _encode_images(self, images: list[Image.Image]) -> Tensor:
        pixels = torch.stack([self.preprocess(image) for image in images])  # (B, 3, H, W)
        return tower_in_parts(self.model.encode_image, pixels.to(self.device, self.dtype))


def _refuse_pickles(name: str, pretrained: str | None) -> None:
    """Raise if local weights are not safetensors; open_clip reads its released pickles as tensors only."""
    from open_clip.factory import _find_checkpoint_in_dir

    is_folder = Path(name).is_dir()
    # open_clip prefers a pickle with a common name to safetensors with another name.
    chosen = _find_checkpoint_in_dir(Path(name)) or name if is_folder else pretrained
    if chosen and (is_folder or Path(chosen).is_file()) and Path(chosen).suffix != ".safetensors":
        command = convert_command(name if is_folder else str(chosen))
        remedy = "load OUT" if is_folder else "pass pretrained=OUT, a name that ends in .safetensors"
        raise ValueError(
            f"The weights {chosen!r} cannot be loaded because they are not in safetensors, and other formats can execute "
            f"code when they are opened. Use {command} and {remedy}."
        )


def _open_clip_model(name: str, pretrained: str | None) -> tuple[Any, str, str]:
    """The model with its weights, its name for the signature, and its name for open_clip's tokenizer."""
    import open_clip

    name = name.removeprefix("local-dir:")  # open_clip's prefix for folders
    model_id = f"open_clip:{name}" + (f"/{Path(pretrained).name}" if pretrained else "")
    _refuse_pickles(name, pretrained)
    if Path(name).is_dir():
        name, model_id = f"local-dir:{name}", f"open_clip:{Path(name).resolve().name}"
    elif not name.startswith("hf-hub:"):
        if name not in open_clip.list_models():
            close = ", ".join(difflib.get_close_matches(name, open_clip.list_models(), n=3, cutoff=0.4))
            raise ValueError(f"{name!r} is neither an architecture of open_clip nor a folder. Similar names: {close}.")
        if not pretrained:
            tags = ", ".join(open_clip.list_pretrained_tags_by_model(name)) or "none are released"
            remedy = f"Use 'open_clip:{name}@TAG' with TAG one of: {tags}; or pretrained='a weights file'."
            raise ValueError(f"open_clip:{name} does not specify weights. {remedy}")
    try:
        return open_clip.create_model(name, pretrained, require_pretrained=True), model_id, name
    except (RuntimeError, FileNotFoundError, ValueError) as error:
        raise ValueError(f"The open_clip scorer {name!r} cannot be loaded: {error}") from error
