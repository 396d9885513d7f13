"""One question to a language model or a vision-language model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_captionrl.io import json_digest

__all__ = ["Prompt"]


@dataclass(frozen=True)
class Prompt:
    """One question to a model.

    Args:
        stage (`str`): Name of the task, part of the hash.
        image_id (`str`): Id of the image.
        user (`str`): The question.
        system (`str`): The instruction before it, or `""`.
        examples (`tuple[tuple[str, str], ...]`): Worked examples: question and answer.
        image (`PIL.Image.Image`, *optional*): The image for a vision model.
        attempt (`int`): 0 for the first attempt; backends sample at later ones.
    """

    stage: str
    image_id: str
    user: str
    system: str = ""
    examples: tuple[tuple[str, str], ...] = ()
    image: Any = field(default=None, compare=False, repr=False)
    attempt: int = 0

    @property
    def hash(self) -> str:
        """Hash of the text that the model reads, 16 hex digits; `image_id` represents the image."""
        return json_digest([self.stage, self.image_id, self.system, self.examples, self.user])

    def turns(self) -> list[dict[str, str]]:
        """The question as a chat: system, examples, user, without the image."""
        turns = [{"role": "system", "content": self.system}] if self.system else []
        for user, assistant in self.examples:
            turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return [*turns, {"role": "user", "content": self.user}]
