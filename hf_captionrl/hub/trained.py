"""What a trainer publishes by itself: the card of its output folder, and the push of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from hf_captionrl.hub.checks import check_card, check_text
from hf_captionrl.hub.contents import PROCESSORS, local_base_model
from hf_captionrl.hub.manifest import MANIFEST_FILE, write_manifest
from hf_captionrl.hub.push import push_folder
from hf_captionrl.hub.templates import render_template
from hf_captionrl.hub.unmeasured import HUB_NAME, write_unmeasured_card
from hf_captionrl.io import atomic_write_text
from hf_captionrl.reports.versions import installed_versions

__all__ = ["push_trained", "write_trained_card"]

_GENERATED = ("[More Information Needed]", "generated automatically according to the information the Trainer")
"""What the cards say that peft and transformers write beside a model; they state nothing."""


def write_trained_card(folder: str | os.PathLike[str], *, model_id: str, **facts: Any) -> Path:
    """Write the card of a trainer's output folder, unless it has one that somebody wrote.

    Args:
        folder: As `trainer.save_model()` wrote it.
        model_id: `name` or `owner/name`.
        facts: `base_model`, `license`, `dataset`, `dataset_id` and `language`, as for [`write_unmeasured_card`].

    Returns:
        `pathlib.Path`: The card.

    Raises:
        ValueError: If a text must not be published.
    """
    folder = Path(folder)
    card = folder / "README.md"
    has_card = card.is_file() and not any(
        text in card.read_text(encoding="utf-8", errors="replace") for text in _GENERATED
    )
    if not (folder / MANIFEST_FILE).is_file():
        write_manifest(folder, command=[], seeds={}, data={})
    if has_card:
        return card
    from hf_captionrl.captioners.saving import SETTINGS_FILE  # which imports torch

    if (folder / SETTINGS_FILE).is_file():
        return write_unmeasured_card(folder, model_id=model_id, **facts)
    return _write_text_card(folder, model_id, **facts)


def _write_text_card(
    folder: Path,
    model_id: str,
    *,
    base_model: str | None = None,
    license: str | None = None,
    dataset: str | None = None,
    dataset_id: str | None = None,
    language: str | None = None,
) -> Path:
    """The card of a model of TRL's trainers, which is no captioner."""
    adapter = folder / "adapter_config.json"
    is_adapter = adapter.is_file()
    if is_adapter and base_model is None:
        base_model = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path") or None
        base_model = Path(base_model).name if base_model and local_base_model(folder) is not None else base_model
    texts = {"model_id": model_id, "base_model": base_model, "license": license, "dataset": dataset}
    for field, value in {**texts, "dataset_id": dataset_id, "language": language}.items():
        if value is not None:
            check_text(field, value)
    sees = any((folder / name).is_file() for name in PROCESSORS)
    task = "image-text-to-text" if sees else "text-generation"
    more: dict[str, Any] = {"base_model_relation": "adapter"} if is_adapter else {}
    data = ModelCardData(
        language=language,
        license=license or "other",
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=task,
        base_model=base_model if base_model and HUB_NAME.fullmatch(base_model) else None,
        datasets=[dataset_id] if dataset_id else None,
        tags=["hf_captionrl"],
        **more,
    )
    text = render_template(
        "model_trained.md",
        metadata=data.to_yaml(),
        model_id=model_id,
        base_model=base_model,
        dataset=dataset,
        is_adapter=is_adapter,
        task=task,
        license=license or "other",
        versions={key: value for key, value in installed_versions().items() if key != "git_revision"},
    )
    check_card(text)
    return atomic_write_text(folder / "README.md", text)


def push_trained(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Add captioner",
    overwrite: bool = False,
) -> str:
    """Push the output folder of a trainer, checked like every push.

    Args:
        folder: With the saved model and its card.
        repo_id: As for [`push_folder`].
        private: Likewise.
        token: Likewise.
        revision: Likewise.
        commit_message: Likewise.
        overwrite: Likewise.

    Returns:
        `str`: Address of the commit.

    Raises:
        FileNotFoundError: As [`push_folder`].
        ValueError: As [`push_folder`].
        FileExistsError: As [`push_folder`].
        PermissionError: As [`push_folder`].
        PushError: As [`push_folder`].
    """
    # Merging loads a captioner, which models of TRL's trainers are not.
    from hf_captionrl.captioners.saving import SETTINGS_FILE

    merged = None if (Path(folder) / SETTINGS_FILE).is_file() else False
    return push_folder(
        folder,
        repo_id,
        private=private,
        token=token,
        revision=revision,
        commit_message=commit_message,
        merged=merged,
        overwrite=overwrite,
    )
