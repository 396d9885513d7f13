"""Models of transformers as backends: one that writes, one that sees, and the captioners of this package."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from hf_captionrl.checkpoints.loading import check_complete, load_pretrained
from hf_captionrl.checkpoints.shipped import model_path
from hf_captionrl.language_models.backend import Answer, Failure, Truncated
from hf_captionrl.language_models.local_models import (
    by_attempt,
    chat_text,
    decoding,
    loaded_revision,
    revision_line,
    seed_draws,
)
from hf_captionrl.language_models.prompt import Prompt

__all__ = ["CaptionerBackend", "TransformersBackend", "TransformersTextBackend", "TransformersVisionBackend"]


def _default_device(device: str | None) -> str:
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def _ids_of(*sources: Any) -> set[int]:
    """Ids of the start, end and padding tokens that tokenizer and configurations name."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "decoder_start_token_id")
    values = [getattr(source, name, None) for source in sources for name in names]
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in values]
    return {int(value) for found in lists for value in found if value is not None}


def _continuation(row: list[int], asked: list[int], special: set[int]) -> list[int]:
    """What a model wrote behind its prompt; all of it where the prompt does not come first.

    BLIP gives the prompt again with another first token and without its last, InstructBLIP gives the answer alone, a chat
    model repeats every token: so special tokens are left out of the comparison.
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


class TransformersBackend:
    """What both backends of transformers do: load, generate, and read the answer off what was generated.

    Args:
        model (`str`): A folder, a name on the Hub, or a shipped model.
        revision (`str`, *optional*): Branch, tag or commit.
        device (`str`, *optional*): Where to; a GPU if there is one.
        dtype (`str`): Of the weights.
        batch_size (`int`): Prompts at a time.
        max_new_tokens (`int`): Longest answer.
    """

    sees_images = False
    model_class: ClassVar[str]
    """Of transformers, that loads the model."""
    processor_class: ClassVar[str]
    """Likewise what prepares its inputs."""

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
        # An answer continues the last token of its prompt.
        self._tokenizer.padding_side = "left"
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        loader = getattr(transformers, self.model_class)
        loaded, missing = load_pretrained(loader, path, revision=revision, dtype=dtype)
        check_complete(path, loaded, missing)
        self._device = _default_device(device)
        self._model: Any = loaded.to(self._device).eval()
        settings = self._model.generation_config
        text_config = self._model.config.get_text_config(decoder=True)
        self._special = _ids_of(self._tokenizer, settings, self._model.config, text_config)
        self._template = str(getattr(self._processor, "chat_template", None) or "")
        self._batch_size, self._max_new_tokens = batch_size, max_new_tokens
        self.model = model
        self.revision = revision_line(loaded_revision(loaded, self._template), max_new_tokens)
        if settings.pad_token_id is None:
            settings.pad_token_id = self._tokenizer.pad_token_id

    def _answers(self, inputs: Any, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Answer]:
        """Generate for a batch, and cut prompts and special tokens off."""
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
    """A causal language model of transformers; arguments as of [`TransformersBackend`]."""

    model_class = "AutoModelForCausalLM"
    processor_class = "AutoTokenizer"

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        """Answer prompts, a batch at a time."""
        longest = getattr(self._model.config, "max_position_embeddings", None)
        for positions in by_attempt(prompts, self._batch_size):
            texts = [chat_text(self._tokenizer, prompts[i]) for i in positions]
            # Templates write the first special token themselves.
            ids = self._tokenizer(texts, add_special_tokens=not self._template)["input_ids"]
            fits = [longest is None or len(row) + 16 <= longest for row in ids]
            for i, row, good in zip(positions, ids, fits, strict=True):
                if not good:
                    yield (
                        i,
                        Failure("backend_rejected", f"the prompt has {len(row)} tokens, the model takes {longest}"),
                    )
            positions = [i for i, good in zip(positions, fits, strict=True) if good]
            if not positions:
                continue
            rows = [row for row, good in zip(ids, fits, strict=True) if good]
            batch = self._tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self._device)
            limit = self._max_new_tokens
            if longest is not None:
                limit = min(limit, longest - batch["input_ids"].shape[1])
            answers = self._answers(batch, [prompts[i] for i in positions], limit)
            yield from zip(positions, answers, strict=True)


class TransformersVisionBackend(TransformersBackend):
    """An image-and-text-to-text model of transformers, with or without a chat template (LLaVA, Qwen-VL, InstructBLIP, BLIP).

    Arguments as of [`TransformersBackend`].
    """

    sees_images = True
    model_class = "AutoModelForImageTextToText"
    processor_class = "AutoProcessor"

    def _text(self, prompt: Prompt) -> str:
        if not self._template:
            return prompt.user
        content = [{"type": "image"}, {"type": "text", "text": prompt.user}]
        turns = [{"role": "user", "content": content}]
        return str(self._processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        """Answer prompts about images."""
        import torch

        from hf_captionrl.captioners.caption_tokens import start_token_settings

        for positions in by_attempt(prompts, self._batch_size):
            batch = [prompts[i] for i in positions]
            texts = [self._text(prompt) for prompt in batch]
            inputs = self._processor(
                images=[prompt.image.convert("RGB") for prompt in batch],
                text=texts,
                padding=True,
                return_tensors="pt",
                **start_token_settings(self._processor, texts[0]),
            ).to(self._device)
            for name, value in inputs.items():
                if torch.is_tensor(value) and value.is_floating_point():
                    inputs[name] = value.to(self._model.dtype)
            yield from zip(positions, self._answers(inputs, batch, self._max_new_tokens), strict=True)


class CaptionerBackend:
    """A captioner of this package as the vision model; it is not asked anything, it describes.

    Args:
        model (`str`): A folder, a name on the Hub, or a shipped model such as `scenes:blip-mle`.
        revision (`str`, *optional*): Branch, tag or commit.
        device (`str`, *optional*): Where to; a GPU if there is one.
        dtype (`str`): Of the weights.
        batch_size (`int`): Images at a time.
        max_new_tokens (`int`): Longest caption.
    """

    sees_images = True

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
            device=_default_device(device),
        )
        self._batch_size, self._max_new_tokens = batch_size, max_new_tokens
        self.model = model
        identity = loaded_revision(self._captioner.model, self._captioner.prompt)
        self.revision = revision_line(identity, max_new_tokens)

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        """Describe the images of prompts."""
        for positions in by_attempt(prompts, self._batch_size):
            batch = [prompts[i] for i in positions]
            inputs = self._captioner.encode_images([prompt.image for prompt in batch])
            seed_draws(batch)
            found = self._captioner.generate(**inputs, **decoding(batch[0].attempt, self._max_new_tokens))
            for position, text, ended in zip(positions, found.captions, found.ended.tolist(), strict=True):
                yield position, text if ended else Truncated(text)
