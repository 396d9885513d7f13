"""One question to a language model or a vision-language model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Prompt"]


@dataclass(frozen=True)
class Prompt:
    """One question to a model.

    Args:
        stage (`str`): One of `STAGES`.
        image_id (`str`): Whose image it is about.
        user (`str`): The question itself.
        system (`str`): The instruction before it, or `""`.
        examples (`tuple[tuple[str, str], ...]`): Worked examples: what the user says, and the answer.
        image (`PIL.Image.Image`, *optional*): What a vision model looks at.
        attempt (`int`): 0 for the first time of asking; backends may draw another answer for a later one.
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
        """16 hex digits of everything the model reads; the image is not in it, `image_id` stands for it."""
        read = json.dumps([self.stage, self.image_id, self.system, self.examples, self.user], ensure_ascii=True)
        return hashlib.blake2b(read.encode(), digest_size=8).hexdigest()

    def turns(self) -> list[dict[str, str]]:
        """The question as a chat: system, examples, user, without the image."""
        turns = [{"role": "system", "content": self.system}] if self.system else []
        for user, assistant in self.examples:
            turns += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        return [*turns, {"role": "user", "content": self.user}]
