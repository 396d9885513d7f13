"""vLLM's offline engine as a backend."""

from __future__ import annotations

from collections.abc import Sequence

from hf_captionrl.language_models.backend import RETRY_TEMPERATURE, Answer, Truncated
from hf_captionrl.language_models.endpoint import chat_turns
from hf_captionrl.language_models.local_models import LocalBackend, folder_revision
from hf_captionrl.language_models.prompt import Prompt

__all__ = ["VLLMBackend"]


class VLLMBackend(LocalBackend):
    """vLLM's offline engine. Install it with `pip install vllm`; most models need a GPU.

    Args:
        model (`str`): A folder or a name on the Hub.
        revision (`str`, *optional*): Branch, tag or commit.
        is_multimodal (`bool`): Whether it answers prompts with images.
        max_new_tokens (`int`): Longest answer.
        dtype (`str`): Data type of the weights.
        seed (`int`): Seed of sampling at later attempts.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        is_multimodal: bool = False,
        max_new_tokens: int = 256,
        dtype: str = "auto",
        seed: int = 0,
    ) -> None:
        try:
            import vllm
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "vLLM is not installed. Use `pip install vllm` (Linux with a GPU), transformers, or an endpoint."
            ) from error
        self._vllm = vllm
        # By default vLLM falls back to pickled weights.
        self._engine = vllm.LLM(model=model, revision=revision, dtype=dtype, seed=seed, load_format="safetensors")
        self._seed, self.is_multimodal = seed, is_multimodal
        # A single batch, because vLLM batches the prompts itself.
        super().__init__(model, folder_revision(model, revision), max_new_tokens=max_new_tokens, engine="vllm")

    def _answer(self, prompts: Sequence[Prompt]) -> list[Answer]:
        attempt = prompts[0].attempt
        settings = self._vllm.SamplingParams(
            temperature=RETRY_TEMPERATURE if attempt else 0.0,
            max_tokens=self._max_new_tokens,
            seed=self._seed + attempt,
        )
        chats = [chat_turns(prompt, self.is_multimodal, image_first=True) for prompt in prompts]
        answers = [found.outputs[0] for found in self._engine.chat(chats, settings, use_tqdm=False)]
        return [Truncated(said.text) if said.finish_reason == "length" else said.text for said in answers]
