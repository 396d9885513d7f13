"""Selects the files of a folder that are published."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from hf_captionrl.hub.manifest import MANIFEST_FILE
from hf_captionrl.hub.publish_checks import check_card, check_secret

__all__ = ["NEVER", "PROCESSORS", "Contents", "folder_contents", "local_base_model"]

_PUBLISHED = {
    "model": (
        *("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "*.html", "*.png"),
        *("adapter/*.safetensors", "adapter/*.json", "adapter/*.md", ".eval_results/*.yaml"),
    ),
    "space": ("*.py", "*.md", "*.txt"),
    "dataset": ("*.parquet", "*.json", "*.jsonl", "*.csv", "*.md", "*.safetensors", "data/*.parquet"),
}
"""Patterns of the files that are published. All other files are omitted."""

NEVER = (
    *("checkpoint-*", "checkpoint-*/**", "*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.npy", "*.npz"),
    *("push_state.json", "card.json", "trainer_state.json", "*.run.json", "quarantine.jsonl", "journal-*"),
)
"""Files that are never published: pickles, which can execute code when they are opened, and the state of a Trainer."""

PROCESSORS = ("processor_config.json", "preprocessor_config.json")
"""Files of an image processor."""
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")
_MAX_SCANNED = 64 * 2**20
_BINARY = (".safetensors", ".parquet", ".png")


@dataclass(frozen=True)
class Contents:
    """Files of a folder, relative to it, with `/`.

    Args:
        published: Files that are uploaded.
        left_out: Files that are not uploaded.
    """

    published: Sequence[str]
    left_out: Sequence[str]


def _files(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() or path.is_symlink():
            yield path.relative_to(folder).as_posix()


def folder_contents(
    folder: str | os.PathLike[str],
    repo_type: str = "model",
    *,
    token: str | None = None,
    gallery: bool | None = None,
) -> Contents:
    """Select and check the files of a folder before anything is uploaded.

    Args:
        folder: Folder to publish.
        repo_type: `model`, `dataset` or `space`.
        token: The token used for the push.
        gallery: Whether to publish HTML pages of a model, such as `gallery.html`, which contain the test images. By
            default only if these are public according to the manifest.

    Returns:
        [`Contents`]: The published files and the others.

    Raises:
        FileNotFoundError: If card, weights, processor or manifest are missing.
        ValueError: If a file is a link out of the folder or contains a token, or the card must not be published.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {str(folder)!r}. Use the folder of a finished model.")
    published: list[str] = []
    left_out: list[str] = []
    shows_images = _has_public_images(folder) if gallery is None else gallery
    for name in _files(folder):
        # fnmatch lets * match a slash, so compare only patterns with the same number of slashes.
        kinds = [kind for kind in _PUBLISHED[repo_type] if kind.count("/") == name.count("/")]
        allowed = any(fnmatch(name, kind) for kind in kinds) and not any(
            fnmatch(name, never) or fnmatch(name.rpartition("/")[2], never) for never in NEVER
        )
        if repo_type == "model" and name.endswith(".html"):
            allowed = allowed and shows_images
        (published if allowed else left_out).append(name)
    for name in published:
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"{name} in {folder} is a link to a place outside the folder. Replace it with the file, or remove it."
            )
        if path.suffix not in _BINARY and path.stat().st_size < _MAX_SCANNED:
            check_secret(name, path.read_text(encoding="utf-8", errors="replace"), token)
        if path.suffix == ".parquet":
            _check_image_paths(name, path)
    _check_complete(folder, repo_type, published)
    return Contents(published, left_out)


def _has_public_images(folder: Path) -> bool:
    """Whether the images of the run are public according to the manifest."""
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
        return manifest["data"]["public_images"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _check_image_paths(name: str, path: Path) -> None:
    """Raise if a table refers to images by local paths."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        columns = [file.schema.column(i).path for i in range(len(file.schema.names))]
        for column in (c for c in columns if c.endswith(".path")):
            for group in range(file.num_row_groups):
                values = file.read_row_group(group, columns=[column]).column(0).to_pylist()
                found = next((v["path"] for v in values if v and v.get("path") and os.path.isabs(v["path"])), None)
                if found:
                    raise ValueError(
                        f"{name} refers to images by local paths, such as {os.path.basename(found)!r}, which others cannot "
                        "access. Embed the images, or omit them (`captionrl boost ... --embed_images`, or "
                        "--no_images)."
                    )


def _check_complete(folder: Path, repo_type: str, published: Sequence[str]) -> None:
    if "README.md" not in published:
        raise FileNotFoundError(f"{folder} has no README.md. Write the card first: captionrl card {folder}")
    metadata = check_card((folder / "README.md").read_text(encoding="utf-8"))
    if repo_type == "model":
        if not any(fnmatch(name, "*.safetensors") for name in published):
            raise FileNotFoundError(
                f"{folder} has no *.safetensors. Other formats are not uploaded, because pickles can execute code when "
                "they are opened. Save with save_pretrained."
            )
        for parts, what in ((PROCESSORS, "image processor"), (_TOKENIZERS, "tokenizer")):
            if parts is PROCESSORS and metadata.get("pipeline_tag") == "text-generation":
                continue  # it only reads text
            if not any(part in published for part in parts):
                raise FileNotFoundError(
                    f"{folder} has no {what} ({', '.join(parts)}), so the model cannot be used. "
                    "Save it with captioner.save_pretrained."
                )
        if MANIFEST_FILE not in published:
            raise FileNotFoundError(
                f"{folder} has no {MANIFEST_FILE}, which describes the training. Write it with "
                f"hf_captionrl.hub.write_manifest, or write card and manifest: captionrl card {folder}"
            )
    # The card of a model that was not measured says so, and has no results.
    is_measured = "model-index" in metadata or "results.json" in published
    if repo_type == "model" and is_measured and not _metrics(metadata):
        raise ValueError(
            f"The card in {folder} has no retrieval number in its model-index. Write it from results.json with `captionrl "
            "card`."
        )


def _metrics(metadata: object) -> list[str]:
    """Retrieval metrics with a number in the `model-index` of a card."""
    found = []
    index = metadata.get("model-index") if isinstance(metadata, dict) else None
    for model in index or []:
        for result in model.get("results", []):
            for metric in result.get("metrics", []):
                if "recall_at" in str(metric.get("type")) and isinstance(metric.get("value"), int | float):
                    found.append(metric["type"])
    return found


def local_base_model(folder: str | os.PathLike[str]) -> str | None:
    """The base model of an adapter if it is a local folder, which others cannot load.

    Args:
        folder: Folder of a checkpoint.

    Returns:
        `str`: The folder; None if there is no adapter, or its base model is on the Hub.
    """
    path = Path(folder) / "adapter_config.json"
    if not path.is_file():
        return None
    base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path") or ""
    return base if os.path.isabs(base) or base.startswith((".", "~")) or os.path.isdir(base) else None
