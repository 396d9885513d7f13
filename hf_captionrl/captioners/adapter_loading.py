"""Loads a saved adapter onto its base model, and rejects other models."""

from __future__ import annotations

import os
import re
import warnings
from typing import Any

from safetensors import safe_open

from hf_captionrl.checkpoints.files import find_file, read_object

__all__ = ["adapter_base", "with_adapter"]


def adapter_base(name: str, revision: str | None, adapters: tuple[str, ...] = ()) -> str:
    """The base model in the configuration of an adapter; `adapters` are those already loaded, to detect cycles."""
    base = read_object(str(find_file(name, "adapter_config.json", revision))).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"adapter_config.json of {name!r} does not name its base model. Pass base_model=...")
    if not isinstance(base, str):
        raise ValueError(
            f"adapter_config.json of {name!r} has {base!r} as base_model_name_or_path, which must be a name or a folder. "
            "Pass base_model=..."
        )
    beside = os.path.normpath(os.path.join(name, base)) if base.startswith(".") else ""
    if os.path.isdir(beside):
        base = beside
    places = {os.path.realpath(place) if os.path.isdir(place) else place for place in (*adapters, name)}
    if (os.path.realpath(base) if os.path.isdir(base) else base) in places:
        raise ValueError(
            f"adapter_config.json of {name!r} has {base!r} as its base model, which is the adapter itself. Pass "
            "base_model=..., the model that it was trained on."
        )
    return base


def with_adapter(model: Any, name: str, file: str, base: str, revision: str | None) -> Any:
    """Load an adapter onto a model, and raise if it does not fit: PEFT only warns, or ignores its weights."""
    from peft import PeftModel, get_peft_model_state_dict

    with safe_open(file, "pt") as stored:
        names = set(stored.keys())
    wrong = ""
    cause: Exception | None = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(model, name, revision=revision, is_trainable=True)
        own = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
        # Counted, not compared by name: older releases of transformers have other names for the same weights.
        places = names - adapted.state_dict().keys()
        if len(places) > len(own):
            wrong = f"it has {min(places - own)}, which the model does not have"
    except UserWarning as error:
        lacking = re.search(r"\['(.*?)'", str(error))
        wrong, cause = f"it lacks {lacking[1] if lacking else 'weights'}", error
    except KeyError as error:
        wrong, cause = f"it lacks {error.args[0]}", error
    except (RuntimeError, ValueError, TypeError) as error:
        cause = error
        found = re.search(r"size mismatch for (\S+): .*?Size\((.*?)\).*?Size\((.*?)\)", str(error))
        wrong = (
            f"{found[1]} is {found[2]} in the adapter and {found[3]} in the model"
            if found
            else "the model has none of the modules that it adapts"
            if "Target modules" in str(error)
            else str(error).splitlines()[0].rstrip(".")
        )
    if wrong:
        raise ValueError(
            f"The adapter {name!r} does not fit {base!r}: {wrong}. Pass base_model=..., the model that it was trained on."
        ) from cause
    return adapted
