"""Backends of transformers: language models, vision-language models, and the captioners of this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hf_captionrl.checkpoints.loading import check_complete, load_pretrained
from hf_captionrl.checkpoints.shipped_models import model_path
from hf_captionrl.language_models.backend import Answer, Failure, Truncated
from hf_captionrl.language_models.local_models import (
    LocalBackend,
    chat_text,
    decoding,
    default_device,
    loaded_revision,
    seed_draws,
)
from hf_captionrl.language_models.prompt import Prompt

__all__ = ["CaptionerBackend", "TransformersBackend", "TransformersTextBackend", "TransformersVisionBackend"]


def _ids_of(*sources: Any) -> set[int]:
    """Ids of the special tokens in tokenizer and configurations."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id")
    values = [getattr(source, name, None) for source in sources for name in names]
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in values]
    return {int(value) for found in lists for value in found if value is not None}


def _continuation(row: list[int], asked: list[int], special: set[int]) -> list[int]:
    """The tokens after the prompt; all tokens if the row does not begin with the prompt.

    Chat models repeat the prompt exactly, BLIP repeats it with another first token and without the last token, and
    InstructBLIP returns only the answer. The comparison therefore ignores special tokens.
    """
    if row[: len(asked)] == asked:
        return row[len(asked) :]
    words = [token for token in asked if token not in special]
    at = matched = 0
    while at < len(row) and matched < len(words) and (row[at] in special or row[at] == words[matched]):
        matched += row[at] not in special
        at += 1
    rest = row[at:] if matched == len(words) else row
    start = next((i for i, token in enumerate(rest) if token not in special), len(rest))
    return rest[start:]


class TransformersBackend(LocalBackend):
    """Base class: loads a model of transformers, generates, and extracts the answers.

    Args:
        model (`str`): A folder, a name on the Hub, or a shipped model.
        revision (`str`, *optional*): Branch, tag or commit.
        device (`str`, *optional*): By default a GPU if there is one.
        dtype (`str`): Data type of the weights.
        batch_size (`int`): Prompts per batch.
        max_new_tokens (`int`): Longest answer.
    """

    model_class: ClassVar[str]
    """Name of the class in transformers that loads the model."""
    processor_class: ClassVar[str]
    """Name of the class in transformers that prepares its inputs."""

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        batch_size: int = 8,
        max_new_tokens: int = 256,
    ) -> None:
        import transformers

        path = model_path(model)
        self._processor: Any = getattr(transformers, self.processor_class).from_pretrained(
            path, revision=revision, trust_remote_code=False
        )
        self._tokenizer: Any = getattr(self._processor, "tokenizer", self._processor)
        # The answer continues the last token of the prompt.
        self._tokenizer.padding_side = "left"
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        loader = getattr(transformers, self.model_class)
        loaded, missing = load_pretrained(loader, path, revision=revision, dtype=dtype)
        check_complete(path, loaded, missing)
        self._device = default_device(device)
        self._model: Any = loaded.to(self._device).eval()
        settings = self._model.generation_config
        text_config = self._model.config.get_text_config(decoder=True)
        self._special = _ids_of(self._tokenizer, settings, self._model.config, text_config)
        self._template = str(getattr(self._processor, "chat_template", None) or "")
        super().__init__(
            model, loaded_revision(loaded, self._template), max_new_tokens=max_new_tokens, batch_size=batch_size
        )
        if settings.pad_token_id is None:
            settings.pad_token_id = self._tokenizer.pad_token_id

    def _generate(self, inputs: Any, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Answer]:
        """Generate for a batch, and remove prompts and special tokens."""
        import torch

        seed_draws(prompts)
        with torch.no_grad():
            found = self._model.generate(**inputs, **decoding(prompts[0].attempt, max_new_tokens)).tolist()
        answers: list[Answer] = []
        for row, asked in zip(found, inputs["input_ids"].tolist(), strict=True):
            written = _continuation(row, asked, self._special)
            words = [token for token in written if token not in self._special]
            text = str(self._tokenizer.decode(words, skip_special_tokens=True))
            ended = len(words) < len(written) or len(written) < max_new_tokens
            answers.append(text if ended else Truncated(text))
        return answers


class TransformersTextBackend(TransformersBackend):
    """A causal language model of transformers; arguments as in [`TransformersBackend`]."""

    model_class = "AutoModelForCausalLM"
    processor_class = "AutoTokenizer"

    def _answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        longest = getattr(self._model.config, "max_position_embeddings", None)
        texts = [chat_text(self._tokenizer, prompt) for prompt in prompts]
        # Chat templates already add the first special token.
        ids = self._tokenizer(texts, add_special_tokens=not self._template)["input_ids"]
        answers: list[Answer] = [
            Failure("backend_rejected", f"the prompt has {len(row)} tokens, but the model accepts {longest}")
            for row in ids
        ]
        fitting = [i for i, row in enumerate(ids) if longest is None or len(row) + 16 <= longest]
        if fitting:
            batch = self._tokenizer.pad({"input_ids": [ids[i] for i in fitting]}, return_tensors="pt").to(self._device)
            limit = self._max_new_tokens
            if longest is not None:
                limit = min(limit, longest - batch["input_ids"].shape[1])
            found = self._generate(batch, [prompts[i] for i in fitting], limit)
            for i, answer in zip(fitting, found, strict=True):
                answers[i] = answer
        return answers


class TransformersVisionBackend(TransformersBackend):
    """An image-text-to-text model of transformers, with or without a chat template (LLaVA, Qwen-VL, InstructBLIP, BLIP).

    Arguments as in [`TransformersBackend`].
    """

    is_multimodal = True
    model_class = "AutoModelForImageTextToText"
    processor_class = "AutoProcessor"

    def _text(self, prompt: Prompt) -> str:
        if not self._template:
            return prompt.user
        content = [{"type": "image"}, {"type": "text", "text": prompt.user}]
        turns = [{"role": "user", "content": content}]
        return str(self._processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def _answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        import torch

        from hf_captionrl.captioners.caption_tokens import start_token_settings

        texts = [self._text(prompt) for prompt in prompts]
        inputs = self._processor(
            images=[prompt.image.convert("RGB") for prompt in prompts],
            text=texts,
            padding=True,
            return_tensors="pt",
            **start_token_settings(self._processor, texts[0]),
        ).to(self._device)
        for name, value in inputs.items():
            if torch.is_tensor(value) and value.is_floating_point():
                inputs[name] = value.to(self._model.dtype)
        return self._generate(inputs, prompts, self._max_new_tokens)


class CaptionerBackend(LocalBackend):
    """A captioner of this package as the vision model; it ignores the question and describes the image.

    Arguments as in [`TransformersBackend`].
    """

    is_multimodal = True

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 8,
        max_new_tokens: int = 100,
    ) -> None:
        import torch

        from hf_captionrl.captioners import load_captioner

        self._captioner = load_captioner(
            model_path(model),
            revision=revision,
            dtype=torch.float32 if dtype == "auto" else getattr(torch, dtype),
            device=default_device(device),
        )
        identity = loaded_revision(self._captioner.model, self._captioner.prompt)
        super().__init__(model, identity, max_new_tokens=max_new_tokens, batch_size=batch_size)

    def _answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        inputs = self._captioner.encode_images([prompt.image for prompt in prompts])
        seed_draws(prompts)
        found = self._captioner.generate(**inputs, **decoding(prompts[0].attempt, self._max_new_tokens))
        return [
            text if ended else Truncated(text)
            for text, ended in zip(found.captions, found.ended.tolist(), strict=True)
        ]
