"""Names (`scenes:NAME`) and folders of the shipped models of the embedded world."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MODELS", "PREFIX", "model_path"]

PREFIX = "scenes:"
"""Prefix of the names of shipped models."""

MODELS: dict[str, str] = {
    "blip-mle": "Captioner trained with maximum likelihood: correct but generic captions.",
    "blip-smile": "Adapter for blip-mle, trained with SMILE: detailed captions.",
    "blip-sr": "Adapter for blip-mle, trained with self-retrieval in bags of look-alikes: distinctive captions.",
    "clipcap-mle": "ClipCap trained with maximum likelihood on the frozen vision tower of clip-reward.",
    "clip-reward": "Reward scorer, which also selects checkpoints.",
    "siglip-held-out": "Held-out scorer of another architecture; only used for evaluation.",
    "gpt2-perplexity": "Language model that measures fluency.",
}
"""From names to descriptions."""

_FOLDER = Path(__file__).parents[1] / "scenes" / "checkpoints"


def model_path(name: str) -> str:
    """Resolve `scenes:NAME` to the folder of a shipped model; other names are returned unchanged.

    Args:
        name (`str`): For instance `"scenes:blip-mle"`, a folder, or a name on the Hub.

    Returns:
        `str`: A folder, or `name` itself.

    Raises:
        ValueError: If no shipped model has that name.
    """
    if not name.startswith(PREFIX):
        return name
    model = name.removeprefix(PREFIX)
    if model not in MODELS:
        raise ValueError(f"There is no shipped model {name!r}. Use one of {[PREFIX + m for m in MODELS]}.")
    return str(_FOLDER / model)
