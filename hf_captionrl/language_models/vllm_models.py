"""vLLM's offline engine as a backend, where it is installed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hf_captionrl.language_models.backend import RETRY_TEMPERATURE, Answer, Truncated
from hf_captionrl.language_models.endpoint import image_url
from hf_captionrl.language_models.local_models import by_attempt, folder_revision, revision_line
from hf_captionrl.language_models.prompt import Prompt

__all__ = ["VLLMBackend"]


class VLLMBackend:
    """vLLM's offline engine; needs `pip install vllm` and, for most models, a GPU.

    Args:
        model (`str`): A folder or a name on the Hub.
        revision (`str`, *optional*): Branch, tag or commit.
        sees_images (`bool`): Whether it answers prompts with images.
        max_new_tokens (`int`): Longest answer.
        dtype (`str`): Of the weights.
        seed (`int`): Of samples for later attempts.
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
        # Of itself vLLM would fall back to pickled weights.
        self._engine = vllm.LLM(model=model, revision=revision, dtype=dtype, seed=seed, load_format="safetensors")
        self._max_new_tokens, self._seed = max_new_tokens, seed
        self.model, self.sees_images = model, sees_images
        self.revision = revision_line(folder_revision(model, revision), max_new_tokens, engine="vllm")

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        """Answer prompts; vLLM batches them itself, so all of them come together."""
        for positions in by_attempt(prompts, max(len(prompts), 1)):
            chats = []
            for prompt in (prompts[i] for i in positions):
                turns: list[dict[str, Any]] = list(prompt.turns())
                if prompt.image is not None and self.sees_images:
                    url = {"type": "image_url", "image_url": {"url": image_url(prompt.image)}}
                    turns[-1] = {"role": "user", "content": [url, {"type": "text", "text": prompt.user}]}
                chats.append(turns)
            attempt = prompts[positions[0]].attempt
            settings = self._vllm.SamplingParams(
                temperature=RETRY_TEMPERATURE if attempt else 0.0,
                max_tokens=self._max_new_tokens,
                seed=self._seed + attempt,
            )
            for position, found in zip(positions, self._engine.chat(chats, settings, use_tqdm=False), strict=True):
                said = found.outputs[0]
                yield position, Truncated(said.text) if said.finish_reason == "length" else said.text
