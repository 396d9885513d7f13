"""Cards of models without results, such as those saved by a trainer's `save_model`, and their push."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from hf_captionrl.hub.manifest import MANIFEST_FILE, public_versions, write_manifest
from hf_captionrl.hub.model_card import FACTS_FILE, read_facts, write_model_card
from hf_captionrl.hub.publish_checks import HUB_NAME, check_card, check_text
from hf_captionrl.hub.publishable_files import PROCESSORS, local_base_model
from hf_captionrl.hub.push import push_folder
from hf_captionrl.hub.templates import render_template
from hf_captionrl.io import atomic_write_text

__all__ = ["push_captioner", "push_trained", "rewrite_model_card", "write_trained_card", "write_unmeasured_card"]

_GENERATED = ("[More Information Needed]", "generated automatically according to the information the Trainer")
"""Text in the cards that peft and transformers generate, which have no content and are replaced."""


def write_unmeasured_card(
    folder: str | os.PathLike[str],
    *,
    model_id: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    dataset: str | None = None,
    dataset_id: str | None = None,
    dataset_description: str | None = None,
    language: str | None = None,
) -> Path:
    """Write the card of a saved captioner without results. The card says that nothing was measured.

    Also writes the manifest, which every published model has, if it is missing.

    Args:
        folder: Folder of a captioner, from `trainer.save_model()` or `captioner.save_pretrained`.
        model_id: `name` or `owner/name`; by default the name of the folder.
        base_model: The model that was finetuned; by default the base model of the adapter, if there is one.
        license: Licence identifier of the Hub; by default `other`.
        dataset: Name of the training data; None to omit it.
        dataset_id: Name of the training data on the Hub, `owner/name`.
        dataset_description: One sentence about the data.
        language: Language code of the captions; None to omit it.

    Returns:
        `pathlib.Path`: The card.

    Raises:
        FileNotFoundError: If the folder does not contain a captioner.
        ValueError: If a text must not be published.
    """
    folder = Path(folder)
    settings = _captioner_settings(folder)
    is_adapter, named = _base_model_of_adapter(folder)
    # A push merges an adapter into a local base model.
    is_adapter = is_adapter and local_base_model(folder) is None
    name = model_id or re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "captioner"
    return _write_card(
        folder,
        texts={"model_id": name, "base_model": base_model or named, "license": license, "dataset": dataset}
        | {"language": language, "description": dataset_description, "dataset_id": dataset_id},
        is_adapter=is_adapter,
        task="image-text-to-text" if settings["family"] == "chat" else "image-to-text",
        tags=["image-captioning", "hf_captionrl"],
        family=settings["family"],
        prompt=settings.get("prompt") or "",
    )


def rewrite_model_card(folder: Path, changes: dict[str, str]) -> str:
    """Write the card of a finished model from its files, with some facts changed; the message for the user."""
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r}. Use the folder of the finished model.")
    if not (folder / FACTS_FILE).is_file():
        write_unmeasured_card(folder, **changes)
        licence = "" if "license" in changes else " The licence is 'other'. Use --license to name it."
        return f"written, without results: no recipe has measured this model.{licence}"
    facts = replace(read_facts(folder), **changes)  # type: ignore[arg-type]
    found = [path for path in (folder / "results.json", folder.parent / "results.json") if path.is_file()]
    if not found:
        raise FileNotFoundError(f"Neither {folder} nor its parent folder has results.json. Evaluate the model first.")
    write_model_card(folder, json.loads(found[0].read_text(encoding="utf-8")), facts)
    return "written."


def write_trained_card(folder: str | os.PathLike[str], *, model_id: str, **facts: Any) -> Path:
    """Write the card of a trainer's output folder, unless the folder already has a card written by a user.

    Args:
        folder: Output of `trainer.save_model()`: a captioner, or a chat model trained with TRL.
        model_id: `name` or `owner/name`.
        facts: `base_model`, `license`, `dataset`, `dataset_id` and `language`, see [`write_unmeasured_card`].

    Returns:
        `pathlib.Path`: The card.

    Raises:
        ValueError: If a text must not be published.
    """
    folder = Path(folder)
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else _GENERATED[0]
    if not any(generated in text for generated in _GENERATED):
        _write_missing_manifest(folder)
        return card
    if _is_captioner(folder):
        return write_unmeasured_card(folder, model_id=model_id, **facts)
    is_adapter, named = _base_model_of_adapter(folder)
    names = ("base_model", "license", "dataset", "dataset_id", "language", "description")
    texts = {**dict.fromkeys(names), "model_id": model_id, **facts}
    if texts["base_model"] is None:
        texts["base_model"] = named
    has_images = any((folder / name).is_file() for name in PROCESSORS)
    task = "image-text-to-text" if has_images else "text-generation"
    return _write_card(folder, texts=texts, is_adapter=is_adapter, task=task, tags=["hf_captionrl"])


def _write_card(
    folder: Path,
    *,
    texts: dict[str, Any],
    is_adapter: bool,
    task: str,
    tags: list[str],
    family: str = "",
    prompt: str = "",
) -> Path:
    """Check the texts from users, and write the card and a missing manifest."""
    for field, value in texts.items():
        if value is not None:
            check_text("dataset_description" if field == "description" else field, value)
    base_model, dataset_id = texts["base_model"], texts["dataset_id"]
    license_name = texts["license"] or "other"
    relation: dict[str, Any] = {"base_model_relation": "adapter"} if is_adapter else {}
    data = ModelCardData(
        language=texts["language"],
        license=license_name,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=task,
        base_model=base_model if base_model and HUB_NAME.fullmatch(base_model) else None,
        datasets=[dataset_id] if dataset_id else None,
        tags=tags,
        **relation,
    )
    card = render_template(
        "model_unmeasured.md",
        **{**texts, "license": license_name},
        metadata=data.to_yaml(),
        is_adapter=is_adapter,
        task=task,
        family=family,
        prompt=prompt,
        versions=public_versions(),
    )
    check_card(card)
    _write_missing_manifest(folder)
    return atomic_write_text(folder / "README.md", card)


def _write_missing_manifest(folder: Path) -> None:
    if not (folder / MANIFEST_FILE).is_file():
        write_manifest(folder, command=[], seeds={}, data={})


def _base_model_of_adapter(folder: Path) -> tuple[bool, str | None]:
    """Whether a folder contains an adapter, and its base model (for a local folder, the last part of the path)."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        return False, None
    named = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path") or None
    return True, Path(named).name if named and local_base_model(folder) is not None else named


def _is_captioner(folder: Path) -> bool:
    from hf_captionrl.captioners.saving import SETTINGS_FILE  # imports torch

    return (folder / SETTINGS_FILE).is_file()


def _captioner_settings(folder: Path) -> dict[str, Any]:
    from hf_captionrl.captioners.saving import SETTINGS_FILE  # imports torch

    path = folder / SETTINGS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {SETTINGS_FILE}, so it is not a saved captioner. Use the folder of trainer.save_model() or "
            "captioner.save_pretrained()."
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}). Save the captioner again.") from None
    if not isinstance(found, dict) or not isinstance(found.get("family"), str):
        raise ValueError(f"{path} does not contain a family. Save the captioner again.")
    return found


def push_captioner(captioner: Any, repo_id: str, **settings: Any) -> str:
    """Save a captioner with a card and push it, with the checks of every push.

    Args:
        captioner ([`Captioner`]): The captioner.
        repo_id: `owner/name`; created if missing.
        settings: `private`, `token` and `overwrite`, see [`push_folder`].

    Returns:
        `str`: URL of the commit.

    Raises:
        ValueError: As [`push_folder`].
        FileExistsError: As [`push_folder`].
        PermissionError: As [`push_folder`].
        PushError: As [`push_folder`].
    """
    with tempfile.TemporaryDirectory() as folder:
        captioner.save_pretrained(folder)
        write_unmeasured_card(folder, model_id=repo_id)
        return push_folder(folder, repo_id, again="Call push_to_hub again.", **settings)


def push_trained(folder: str | os.PathLike[str], repo_id: str, **settings: Any) -> str:
    """Push the output folder of a trainer, with the checks of every push.

    Args:
        folder: Folder with the saved model and its card.
        repo_id: See [`push_folder`].
        settings: `private`, `token`, `revision`, `commit_message` and `overwrite`, see [`push_folder`].

    Returns:
        `str`: URL of the commit.

    Raises:
        FileNotFoundError: As [`push_folder`].
        ValueError: As [`push_folder`].
        FileExistsError: As [`push_folder`].
        PermissionError: As [`push_folder`].
        PushError: As [`push_folder`].
    """
    # Merging loads a captioner; models of TRL's trainers are not captioners.
    return push_folder(folder, repo_id, merged=None if _is_captioner(Path(folder)) else False, **settings)
