"""Names of the shipped models of the embedded world (`scenes:NAME`), and the folders that hold them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MODELS", "PREFIX", "model_path"]

PREFIX = "scenes:"
"""What a name begins with that means a shipped model."""

MODELS: dict[str, str] = {
    "blip-mle": "Captioner after maximum likelihood: generic and right.",
    "blip-smile": "Adapter on blip-mle after SMILE: says all that it sees.",
    "blip-sr": "Adapter on blip-mle after self-retrieval in bags of look-alikes: says what tells images apart.",
    "clipcap-mle": "ClipCap after maximum likelihood, on the frozen vision tower of clip-reward.",
    "clip-reward": "Scorer that rewards, and that selects checkpoints.",
    "siglip-held-out": "Scorer of another seed that judges; nothing is ever trained against it.",
    "gpt2-perplexity": "Language model that judges fluency.",
}
"""Names and roles."""

_FOLDER = Path(__file__).parents[1] / "scenes" / "checkpoints"


def model_path(name: str) -> str:
    """Resolve `scenes:NAME` to the folder of a shipped model; every other name stays as it is.

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
