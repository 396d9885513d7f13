"""Local models as backends: transformers for text and for images, and vLLM where it is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hf_captionrl.boosting.backend import Failure
from hf_captionrl.boosting.http_backend import image_url
from hf_captionrl.boosting.prompts import Prompt
from hf_captionrl.scenes.models import model_path

__all__ = ["CaptionerBackend", "TransformersTextBackend", "TransformersVisionBackend", "VLLMBackend", "chat_text"]


def _revision(config: Any, revision: str | None) -> str:
    """The commit that was loaded, where the library tells it."""
    return str(getattr(config, "_commit_hash", None) or revision or "")


def _decoding(attempt: int, max_new_tokens: int) -> dict[str, Any]:
    """Greedy at first; a bad answer is drawn anew, for greedy decoding would give it again."""
    if attempt == 0:
        return {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens}
    return {"do_sample": True, "temperature": 0.7, "num_beams": 1, "max_new_tokens": max_new_tokens}


def _by_attempt(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[int]]:
    """Batches of positions whose prompts are decoded alike."""
    for attempt in sorted({prompt.attempt for prompt in prompts}):
        positions = [i for i, prompt in enumerate(prompts) if prompt.attempt == attempt]
        yield from (positions[start : start + batch_size] for start in range(0, len(positions), batch_size))


def _seed(prompts: Sequence[Prompt]) -> None:
    """Samples depend on what is asked and on the attempt, not on what was asked before: a resumed run draws the same."""
    import torch

    torch.manual_seed(int(prompts[0].hash[:15], 16) + prompts[0].attempt)


def chat_text(tokenizer: Any, prompt: Prompt) -> str:
    """A prompt as the text a language model continues.

    Templates without a system role (Mistral's first) get the instruction in front of the first question; a model without
    a template gets the paper's plain layout, `User : ... Assistant : ...`.

    Args:
        tokenizer: A transformers tokenizer.
        prompt ([`Prompt`]): The question.

    Returns:
        `str`: Text that ends where the answer begins.
    """
    turns = prompt.turns()
    if not getattr(tokenizer, "chat_template", None):
        parts = [prompt.system] if prompt.system else []
        for user, assistant in prompt.examples:
            parts += [f"User : {user}", f"Assistant : {assistant}"]
        return "\n\n".join([*parts, f"User : {prompt.user}", "Assistant :"])
    from jinja2.exceptions import TemplateError

    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except TemplateError:
        if turns[0]["role"] != "system":
            raise
        first = {"role": "user", "content": f"{turns[0]['content']}\n\n{turns[1]['content']}"}
        return str(tokenizer.apply_chat_template([first, *turns[2:]], tokenize=False, add_generation_prompt=True))


class TransformersTextBackend:
    """A causal language model of transformers.

    Args:
        model (`str`): A folder, a name on the Hub, or a shipped model.
        revision (`str`, *optional*): Branch, tag or commit.
        device (`str`, *optional*): Where to; a GPU if there is one.
        dtype (`str`): Of the weights.
        batch_size (`int`): Prompts at a time.
        max_new_tokens (`int`): Longest answer.
    """

    sees_images = False

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
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = model_path(model)
        # Left padding: an answer continues the last token of its prompt.
        self._tokenizer = AutoTokenizer.from_pretrained(path, revision=revision, padding_side="left")
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        loaded = AutoModelForCausalLM.from_pretrained(path, revision=revision, dtype=dtype, use_safetensors=True)
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._model = loaded.to(self._device).eval()
        self._batch_size, self._max_new_tokens = batch_size, max_new_tokens
        self.model = model
        self.revision = "; ".join(
            filter(None, (_revision(loaded.config, revision), f"greedy max_new_tokens={max_new_tokens}"))
        )

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str | Failure]]:
        """Answer prompts, a batch at a time.

        Args:
            prompts (`Sequence[Prompt]`): The questions.

        Yields:
            `tuple[int, str | Failure]`: Position of the prompt, and its answer; a prompt longer than the model's context
            fails.
        """
        import torch

        longest = getattr(self._model.config, "max_position_embeddings", None)
        for positions in _by_attempt(prompts, self._batch_size):
            texts = [chat_text(self._tokenizer, prompts[i]) for i in positions]
            # Templates write the first special token themselves.
            special = not getattr(self._tokenizer, "chat_template", None)
            ids = self._tokenizer(texts, add_special_tokens=special)["input_ids"]
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
            batch = self._tokenizer.pad(
                {"input_ids": [row for row, good in zip(ids, fits, strict=True) if good]}, return_tensors="pt"
            ).to(self._device)
            width = batch["input_ids"].shape[1]
            settings = _decoding(prompts[positions[0]].attempt, self._max_new_tokens)
            if longest is not None:
                settings["max_new_tokens"] = min(settings["max_new_tokens"], longest - width)
            _seed([prompts[i] for i in positions])
            with torch.no_grad():
                found = self._model.generate(**batch, **settings, pad_token_id=self._tokenizer.pad_token_id)
            answers = self._tokenizer.batch_decode(found[:, width:], skip_special_tokens=True)
            yield from zip(positions, answers, strict=True)


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
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )
        self._batch_size, self._max_new_tokens = batch_size, max_new_tokens
        self.model = model
        config = getattr(self._captioner.base_model, "config", None)
        self.revision = "; ".join(
            filter(None, (_revision(config, revision), f"greedy max_new_tokens={max_new_tokens}"))
        )

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str | Failure]]:
        """Describe the images of prompts.

        Args:
            prompts (`Sequence[Prompt]`): With images.

        Yields:
            `tuple[int, str | Failure]`: Position of the prompt, and its caption.
        """
        for positions in _by_attempt(prompts, self._batch_size):
            batch = [prompts[i] for i in positions]
            inputs = self._captioner.encode_images([prompt.image for prompt in batch])
            _seed(batch)
            settings = _decoding(batch[0].attempt, self._max_new_tokens)
            yield from zip(positions, self._captioner.generate(**inputs, **settings).captions, strict=True)


class TransformersVisionBackend:
    """An image-and-text-to-text model of transformers, with or without a chat template (LLaVA, Qwen-VL, InstructBLIP).

    Args:
        model (`str`): A folder or a name on the Hub.
        revision (`str`, *optional*): Branch, tag or commit.
        device (`str`, *optional*): Where to; a GPU if there is one.
        dtype (`str`): Of the weights.
        batch_size (`int`): Images at a time.
        max_new_tokens (`int`): Longest answer.
    """

    sees_images = True

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
        import torch
        from transformers import AutoModelForImageTextToText, AutoProcessor

        path = model_path(model)
        self._processor = AutoProcessor.from_pretrained(path, revision=revision)
        tokenizer = getattr(self._processor, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.padding_side = "left"
        loaded = AutoModelForImageTextToText.from_pretrained(
            path, revision=revision, dtype=dtype, use_safetensors=True
        )
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._model = loaded.to(self._device).eval()
        self._batch_size, self._max_new_tokens = batch_size, max_new_tokens
        self.model = model
        self.revision = "; ".join(
            filter(None, (_revision(loaded.config, revision), f"greedy max_new_tokens={max_new_tokens}"))
        )

    def _text(self, prompt: Prompt) -> str:
        if not getattr(self._processor, "chat_template", None):
            return prompt.user
        content = [{"type": "image"}, {"type": "text", "text": prompt.user}]
        turns = [{"role": "user", "content": content}]
        return str(self._processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str | Failure]]:
        """Answer prompts about images.

        Args:
            prompts (`Sequence[Prompt]`): With images.

        Yields:
            `tuple[int, str | Failure]`: Position of the prompt, and its answer.
        """
        import torch

        for positions in _by_attempt(prompts, self._batch_size):
            batch = [prompts[i] for i in positions]
            inputs = self._processor(
                images=[prompt.image.convert("RGB") for prompt in batch],
                text=[self._text(prompt) for prompt in batch],
                padding=True,
                return_tensors="pt",
            ).to(self._device)
            for name, value in inputs.items():
                if torch.is_tensor(value) and value.is_floating_point():
                    inputs[name] = value.to(self._model.dtype)
            _seed(batch)
            with torch.no_grad():
                found = self._model.generate(**inputs, **_decoding(batch[0].attempt, self._max_new_tokens))
            # InstructBLIP and other models with a decoder of their own give the answer alone; chat models, all of it.
            width = inputs["input_ids"].shape[1]
            whole = found.shape[1] > width and torch.equal(found[:, :width], inputs["input_ids"])
            answers = self._processor.batch_decode(found[:, width:] if whole else found, skip_special_tokens=True)
            yield from zip(positions, answers, strict=True)


class VLLMBackend:
    """vLLM's offline engine; needs `pip install vllm` and, for most models, a GPU.

    Args:
        model (`str`): A folder or a name on the Hub.
        revision (`str`, *optional*): Branch, tag or commit.
        sees_images (`bool`): Whether it answers prompts with images.
        max_new_tokens (`int`): Longest answer.
        dtype (`str`): Of the weights.
        seed (`int`): Of samples for later attempts.

    Raises:
        ModuleNotFoundError: If vLLM is not installed.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        sees_images: bool = False,
        max_new_tokens: int = 256,
        dtype: str = "auto",
        seed: int = 0,
    ) -> None:
        try:
            import vllm
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "vLLM is not installed. Install it with: pip install vllm (Linux with a GPU), or use transformers or an "
                "endpoint."
            ) from error
        self._vllm = vllm
        self._engine = vllm.LLM(model=model, revision=revision, dtype=dtype, seed=seed)
        self._max_new_tokens, self._seed = max_new_tokens, seed
        self.model, self.sees_images = model, sees_images
        self.revision = "; ".join(filter(None, (revision, f"vllm greedy max_new_tokens={max_new_tokens}")))

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, str | Failure]]:
        """Answer prompts; vLLM batches them itself.

        Args:
            prompts (`Sequence[Prompt]`): The questions.

        Yields:
            `tuple[int, str | Failure]`: Position of the prompt, and its answer.
        """
        for positions in _by_attempt(prompts, max(len(prompts), 1)):
            chats = []
            for prompt in (prompts[i] for i in positions):
                turns: list[dict[str, Any]] = list(prompt.turns())
                if prompt.image is not None and self.sees_images:
                    url = {"type": "image_url", "image_url": {"url": image_url(prompt.image)}}
                    turns[-1] = {"role": "user", "content": [url, {"type": "text", "text": prompt.user}]}
                chats.append(turns)
            attempt = prompts[positions[0]].attempt
            settings = self._vllm.SamplingParams(
                temperature=0.7 if attempt else 0.0, max_tokens=self._max_new_tokens, seed=self._seed + attempt
            )
            answers = self._engine.chat(chats, settings, use_tqdm=False)
            yield from zip(positions, (answer.outputs[0].text for answer in answers), strict=True)
