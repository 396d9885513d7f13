"""Base class of backends with a local model, and helpers for its revision, decoding, seed and chat text."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_captionrl.language_models.backend import RETRY_TEMPERATURE, Answer
from hf_captionrl.language_models.prompt import Prompt

__all__ = [
    "LocalBackend",
    "chat_text",
    "decoding",
    "default_device",
    "folder_revision",
    "loaded_revision",
    "revision_line",
    "seed_draws",
]


def default_device(device: str | None) -> str:
    """The device, or a GPU if there is one."""
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def loaded_revision(model: Any, *parts: str) -> str:
    """Commit of a loaded model from the Hub, or a hash of its weights.

    Folders and adapters get the hash: the weights of a folder can change without its name, and the commit of an adapter's
    base model does not identify the adapter.
    """
    from hf_captionrl.retrieval.content_hashes import model_fingerprint

    commit = getattr(getattr(model, "config", None), "_commit_hash", None)
    if commit and not hasattr(model, "peft_config"):
        return str(commit)
    generation = getattr(model, "generation_config", None)
    # The version that wrote the file does not change the model.
    settings = {} if generation is None else {**generation.to_diff_dict(), "transformers_version": None}
    return model_fingerprint(model, json.dumps(settings, sort_keys=True, default=str), *parts)[:12]


def folder_revision(model: str, revision: str | None) -> str:
    """Revision of a model loaded by another engine: a hash of the files of a folder, or the commit in the Hub's cache."""
    folder = Path(model)
    if folder.is_dir():
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(
            path for path in folder.iterdir() if path.suffix in (".safetensors", ".json", ".model", ".jinja")
        ):
            with path.open("rb") as file:
                digest.update(path.name.encode() + hashlib.file_digest(file, "blake2b").digest())
        return digest.hexdigest()[:12]
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else revision or ""


def revision_line(identity: str, max_new_tokens: int, *, engine: str = "") -> str:
    """Identity and settings that change answers, as stored in the journal."""
    return "; ".join(filter(None, (identity, f"{engine} greedy max_new_tokens={max_new_tokens}".strip())))


def decoding(attempt: int, max_new_tokens: int) -> dict[str, Any]:
    """Arguments of `generate`: greedy at first, sampling at later attempts, because greedy repeats a bad answer."""
    if attempt == 0:
        return {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens}
    return {"do_sample": True, "temperature": RETRY_TEMPERATURE, "num_beams": 1, "max_new_tokens": max_new_tokens}


class LocalBackend(ABC):
    """Answers prompts batch by batch. Subclasses load the model and answer one batch.

    Args:
        model (`str`): Name for the provenance of each answer.
        identity (`str`): Commit of the model, or hash of its weights.
        max_new_tokens (`int`): Longest answer.
        batch_size (`int`, *optional*): Prompts per batch; `None` for all.
        engine (`str`): Name of the engine in the revision.
    """

    is_multimodal = False

    def __init__(
        self, model: str, identity: str, *, max_new_tokens: int, batch_size: int | None = None, engine: str = ""
    ) -> None:
        self.model = model
        self.revision = revision_line(identity, max_new_tokens, engine=engine)
        self._batch_size, self._max_new_tokens = batch_size, max_new_tokens

    def complete(self, prompts: Sequence[Prompt]) -> Iterator[tuple[int, Answer]]:
        """Answer prompts in batches with the same attempt, because its number determines the decoding."""
        for attempt in sorted({prompt.attempt for prompt in prompts}):
            positions = [i for i, prompt in enumerate(prompts) if prompt.attempt == attempt]
            size = self._batch_size or len(positions)
            for start in range(0, len(positions), size):
                batch = positions[start : start + size]
                yield from zip(batch, self._answer([prompts[i] for i in batch]), strict=True)

    @abstractmethod
    def _answer(self, prompts: Sequence[Prompt]) -> Sequence[Answer]:
        """Answer one batch."""


def seed_draws(prompts: Sequence[Prompt]) -> None:
    """Seed sampling with the first prompt and its attempt, so that a batch gets the same answers in a resumed run."""
    import torch

    torch.manual_seed(int(prompts[0].hash[:15], 16) + prompts[0].attempt)


def chat_text(tokenizer: Any, prompt: Prompt) -> str:
    """The text of a prompt that a language model continues.

    If a template has no system role (the first Mistral), the instruction is put before the first question. A model without
    a template gets the plain layout of the paper, `User : ... Assistant : ...`.
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
