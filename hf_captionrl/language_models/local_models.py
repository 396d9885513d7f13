"""What backends of local models share: how they are named, decoded and drawn from, and the text a chat becomes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_captionrl.language_models.backend import RETRY_TEMPERATURE
from hf_captionrl.language_models.prompt import Prompt

__all__ = ["by_attempt", "chat_text", "decoding", "folder_revision", "loaded_revision", "revision_line", "seed_draws"]


def loaded_revision(model: Any, *parts: str) -> str:
    """What tells a loaded model from one that was trained further: its commit, or a hash of its weights.

    Only the Hub gives a commit. A folder can hold other weights tomorrow under the same name, and an adapter's base keeps
    its commit whatever the adapter is; both get the hash.
    """
    from hf_captionrl.retrieval.content_hashes import model_fingerprint

    commit = getattr(getattr(model, "config", None), "_commit_hash", None)
    if commit and not hasattr(model, "peft_config"):
        return str(commit)
    generation = getattr(model, "generation_config", None)
    # The version that wrote the file changes nothing.
    settings = {} if generation is None else {**generation.to_diff_dict(), "transformers_version": None}
    return model_fingerprint(model, json.dumps(settings, sort_keys=True, default=str), *parts)[:12]


def folder_revision(model: str, revision: str | None) -> str:
    """The same for a model that another process holds: of a folder a hash of its files, else the commit in the cache."""
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
    """Identity and settings that change answers, as the journal keeps them."""
    return "; ".join(filter(None, (identity, f"{engine} greedy max_new_tokens={max_new_tokens}".strip())))


def decoding(attempt: int, max_new_tokens: int) -> dict[str, Any]:
    """Greedy at first; a bad answer is drawn anew, for greedy decoding would give it again."""
    if attempt == 0:
        return {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens}
    return {"do_sample": True, "temperature": RETRY_TEMPERATURE, "num_beams": 1, "max_new_tokens": max_new_tokens}


def by_attempt(prompts: Sequence[Prompt], batch_size: int) -> Iterator[list[int]]:
    """Batches of positions whose prompts are decoded alike."""
    for attempt in sorted({prompt.attempt for prompt in prompts}):
        positions = [i for i, prompt in enumerate(prompts) if prompt.attempt == attempt]
        yield from (positions[start : start + batch_size] for start in range(0, len(positions), batch_size))


def seed_draws(prompts: Sequence[Prompt]) -> None:
    """Let samples depend on what is asked and on the attempt, not on what was asked before.

    A batch draws the same in a resumed run; prompts that come in other batches there draw anew.
    """
    import torch

    torch.manual_seed(int(prompts[0].hash[:15], 16) + prompts[0].attempt)


def chat_text(tokenizer: Any, prompt: Prompt) -> str:
    """A prompt as the text a language model continues.

    Templates without a system role (Mistral's first) get the instruction in front of the first question; a model without
    a template gets the paper's plain layout, `User : ... Assistant : ...`.
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
