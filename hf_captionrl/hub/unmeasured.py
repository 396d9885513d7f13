"""Cards of models that no recipe has measured, such as those of a trainer's `save_model`, and their push."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from hf_captionrl.hub.checks import check_card, check_text
from hf_captionrl.hub.contents import local_base_model
from hf_captionrl.hub.manifest import MANIFEST_FILE, write_manifest
from hf_captionrl.hub.push import push_folder
from hf_captionrl.hub.templates import render_template
from hf_captionrl.io import atomic_write_text
from hf_captionrl.reports.versions import installed_versions

__all__ = ["HUB_NAME", "push_captioner", "write_unmeasured_card"]

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
"""`owner/name`."""


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
    """Write the card of a saved captioner without results; it says that nothing was measured.

    The manifest, which every published model has, is written too where it is missing.

    Args:
        folder: Of a captioner, as `trainer.save_model()` or `captioner.save_pretrained` wrote it.
        model_id: `name` or `owner/name`; None for the folder's name.
        base_model: What it was finetuned from; None for what the adapter names, or not to say it.
        license: As the Hub writes it; None for `other`.
        dataset: Name of the training data; None not to say it.
        dataset_id: Its name on the Hub, `owner/name`.
        dataset_description: A sentence on the data.
        language: Language code of the captions; None not to say it.

    Returns:
        `pathlib.Path`: The card.

    Raises:
        FileNotFoundError: If the folder holds no captioner.
        ValueError: If a text must not be published.
    """
    folder = Path(folder)
    settings = _settings(folder)
    adapter = folder / "adapter_config.json"
    named = (
        json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path") if adapter.is_file() else None
    )
    is_local = local_base_model(folder) is not None
    base_model = base_model or (Path(named).name if named and is_local else named)
    name = model_id or re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "captioner"
    texts = {"model_id": name, "base_model": base_model, "license": license, "dataset": dataset, "language": language}
    for field, value in {**texts, "dataset_description": dataset_description, "dataset_id": dataset_id}.items():
        if value is not None:
            check_text(field, value)
    is_adapter = adapter.is_file() and not is_local
    more: dict[str, Any] = {"base_model_relation": "adapter"} if is_adapter else {}
    data = ModelCardData(
        language=language,
        license=license or "other",
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="image-text-to-text" if settings["family"] == "chat" else "image-to-text",
        base_model=base_model if base_model and HUB_NAME.fullmatch(base_model) else None,
        datasets=[dataset_id] if dataset_id else None,
        tags=["image-captioning", "hf_captionrl"],
        **more,
    )
    card = render_template(
        "model_unmeasured.md",
        metadata=data.to_yaml(),
        model_id=name,
        base_model=base_model,
        dataset=dataset,
        description=dataset_description,
        family=settings["family"],
        prompt=settings.get("prompt") or "",
        is_adapter=is_adapter,
        license=license or "other",
        versions={key: value for key, value in installed_versions().items() if key != "git_revision"},
    )
    check_card(card)
    if not (folder / MANIFEST_FILE).is_file():
        write_manifest(folder, command=[], seeds={}, data={})
    return atomic_write_text(folder / "README.md", card)


def _settings(folder: Path) -> dict[str, Any]:
    from hf_captionrl.captioners.saving import SETTINGS_FILE  # which imports torch

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
        raise ValueError(f"{path} names no family. Save the captioner again.")
    return found


def push_captioner(
    captioner: Any, repo_id: str, *, private: bool = True, token: str | None = None, overwrite: bool = False
) -> str:
    """Save a captioner with a card and push it, checked like every push.

    Args:
        captioner ([`Captioner`]): The captioner.
        repo_id: `owner/name`; created if missing.
        private: Whether a new repository is private.
        token: Of the Hub; by default the one stored by `hf auth login`.
        overwrite: Push also into a repository that holds other content.

    Returns:
        `str`: Address of the commit.

    Raises:
        ValueError: As `push_folder`.
        FileExistsError: As `push_folder`.
        PermissionError: As `push_folder`.
        PushError: As `push_folder`.
    """
    with tempfile.TemporaryDirectory() as folder:
        captioner.save_pretrained(folder)
        write_unmeasured_card(folder, model_id=repo_id)
        again = "Call push_to_hub again."
        return push_folder(folder, repo_id, private=private, token=token, overwrite=overwrite, again=again)
