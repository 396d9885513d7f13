"""Which checkpoints are whole: each is sealed when it is finished, and looked through before a run goes on from it.

A kill while a checkpoint is written leaves a folder without a seal; a disk that fails later, or a careless hand, leaves
one whose files differ from it. A run goes on from the newest one that is whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path

from hf_captionrl.checkpoints.files import check_index
from hf_captionrl.checkpoints.weights import convert_command
from hf_captionrl.io import write_json

__all__ = ["SEAL_FILE", "checkpoint_fault", "has_checkpoint", "newest_checkpoint", "seal_checkpoint", "whole_or_older"]

logger = logging.getLogger(__name__)

SEAL_FILE = "seal.json"
"""Written last: size and SHA-256 of every other file of the checkpoint."""

_NAME = re.compile(r"checkpoint-(\d+)")
# Weights that Trainers of old wrote, and that transformers' still reads where there are no others.
_PICKLED_WEIGHTS = re.compile(r"(pytorch|adapter)_model(-\d+-of-\d+)?\.bin(\.index\.json)?")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seal_checkpoint(folder: str | os.PathLike[str]) -> Path:
    """Declare a checkpoint finished, once all that it holds is on the disk.

    Args:
        folder: The checkpoint. Reading it takes about a second for each gigabyte or two.

    Returns:
        `pathlib.Path`: The seal.
    """
    folder = Path(folder)
    (folder / SEAL_FILE).unlink(missing_ok=True)
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "r+b") as file:  # a loss of power must not undo what the seal says is there
                os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": _digest(path)}
    return write_json(folder / SEAL_FILE, {"files": files})


def checkpoint_fault(folder: str | os.PathLike[str]) -> str | None:
    """What is wrong with a checkpoint: it is not whole, or holds weights as pickles, which run code when opened.

    Args:
        folder: The checkpoint.

    Returns:
        `str`: In a few words; None for a checkpoint that is whole.
    """
    folder = Path(folder)
    if not (folder / SEAL_FILE).is_file():
        return f"it was never finished, for it has no {SEAL_FILE}"
    try:
        files = json.loads((folder / SEAL_FILE).read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(file["size"]), str(file["sha256"])) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"its {SEAL_FILE} is damaged"
    # Where a Trainer looks: in the folder, and one below it for each adapter.
    inner = (path for place in folder.iterdir() if place.is_dir() for path in place.iterdir())
    for path in sorted([*folder.iterdir(), *inner]):
        if _PICKLED_WEIGHTS.fullmatch(path.name):
            where = path.relative_to(folder).as_posix()
            return f"{where} is a pickle; weights are taken from safetensors alone: use {convert_command(str(folder))}"
        if path.name.endswith(".safetensors.index.json"):
            try:
                check_index(path)
            except ValueError as error:
                return str(error).rstrip(".")
    # Sizes first: what is cut off or missing is found without reading gigabytes.
    for name, (size, _) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return next((f"{n} is damaged" for n, (_, digest) in expected.items() if _digest(folder / n) != digest), None)


def _checkpoints(folder: Path, last: int | None = None) -> list[Path]:
    """Newest first, those of later steps than `last` left out."""
    found = {}
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and path.is_dir() and (last is None or int(match[1]) <= last):
            found[int(match[1])] = path
    return [found[step] for step in sorted(found, reverse=True)]


def has_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a checkpoint that was finished, whole or not; a warning if it holds only others.

    Args:
        folder: Output folder of a trainer; need not be there.

    Returns:
        `bool`: True if a run can be expected to go on from it; False if nothing was lost that one could go on from.
    """
    found = _checkpoints(Path(folder))
    if any((path / SEAL_FILE).is_file() for path in found):
        return True
    if found:
        logger.warning("%s was never finished. Training in %s starts anew.", found[0].name, folder)
    return False


def newest_checkpoint(folder: str | os.PathLike[str], *, last: int | None = None) -> str:
    """The newest checkpoint that is whole; one warning names those that are not, and why.

    Args:
        folder: Output folder of a trainer.
        last: Only checkpoints up to this step.

    Returns:
        `str`: Its folder.

    Raises:
        ValueError: If there is no checkpoint, or none is whole.
    """
    broken: list[str] = []
    for path in _checkpoints(Path(folder), last):
        fault = checkpoint_fault(path)
        if fault is None:
            if broken:
                logger.warning("Skipped %s. Training goes on from %s.", "; ".join(broken), path.name)
            return str(path)
        broken.append(f"{path.name} ({fault})")
    if broken:
        raise ValueError(
            f"No checkpoint in {str(folder)!r} is whole: {'; '.join(broken)}. Start anew without "
            "resume_from_checkpoint, or bring a copy back."
        )
    raise ValueError(f"There is no checkpoint in {str(folder)!r}. Start without resume_from_checkpoint.")


def whole_or_older(checkpoint: str | os.PathLike[str]) -> str:
    """A named checkpoint if it is whole, else the newest whole one of the same run before it.

    Args:
        checkpoint: Its folder.

    Returns:
        `str`: The folder to go on from.

    Raises:
        ValueError: If it is not there, or neither it nor any before it is whole.
    """
    path = Path(checkpoint)
    if not path.is_dir():
        raise ValueError(
            f"There is no checkpoint {str(checkpoint)!r}. Name its folder, or use True for the newest one in output_dir."
        )
    match = _NAME.fullmatch(path.name)
    if match:
        return newest_checkpoint(path.parent, last=int(match[1]))
    if fault := checkpoint_fault(path):
        raise ValueError(f"The checkpoint {str(checkpoint)!r} is not whole: {fault}. Name another one.")
    return str(path)
