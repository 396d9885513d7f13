"""Complete checkpoints and their runs: each checkpoint is sealed when it is complete, and verified before a resume.

A kill during a save leaves a folder without a seal. A disk error or a manual change leaves files that differ from the seal.
A run resumes from its newest complete checkpoint.

A `train` that does not resume starts a run with a new run id. The output folder records the id of the run that uses it, and
every checkpoint the id of the run that wrote it. A resumed run keeps the id of its checkpoint. Checkpoints of other runs in
the same folder are neither used nor removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from hf_captionrl.checkpoints.files import check_index
from hf_captionrl.checkpoints.weights import convert_command
from hf_captionrl.io import write_json

__all__ = [
    "RUN_FILE",
    "SEAL_FILE",
    "begin_run",
    "checkpoint_fault",
    "has_checkpoint",
    "last_sealed",
    "newest_checkpoint",
    "newest_complete_checkpoint",
    "open_checkpoint",
    "remove_older",
    "resume_run",
    "run_of_checkpoint",
    "seal_checkpoint",
]

logger = logging.getLogger(__name__)

SEAL_FILE = "seal.json"
"""Written last: the id of the run, and size and SHA-256 of every other file of the checkpoint."""

RUN_FILE = ".run.json"
"""Written first, to a checkpoint and to an output folder: the id of the run."""

_NAME = re.compile(r"checkpoint-(\d+)")
# Weights of older Trainers, which transformers still reads if there are no others.
_PICKLED_WEIGHTS = re.compile(r"(pytorch|adapter)_model(-\d+-of-\d+)?\.bin(\.index\.json)?")
# Errors of reading a damaged JSON file; RecursionError for lists that are nested too deeply.
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_run_id(path: Path) -> str | None:
    """The `run_id` of a file; None where it names none. Raises one of `_UNREADABLE` where there is no such file."""
    found = json.loads(path.read_text(encoding="utf-8"))["run_id"]
    return None if found is None else str(found)


def run_of_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The id of the run that wrote a checkpoint."""
    for name in (SEAL_FILE, RUN_FILE):
        try:
            return _read_run_id(Path(folder) / name)
        except _UNREADABLE:
            continue
    return None


def begin_run(folder: str | os.PathLike[str]) -> str:
    """Record that a new run uses an output folder, so that checkpoints already there are those of other runs."""
    run_id = secrets.token_hex(16)  # not from a seeded generator: two runs with the same seed have different ids
    write_json(Path(folder) / RUN_FILE, {"run_id": run_id})
    return run_id


def resume_run(folder: str | os.PathLike[str], checkpoint: str | os.PathLike[str]) -> str | None:
    """Record that the run of a checkpoint uses an output folder; its later checkpoints there are renamed."""
    run_id, folder = run_of_checkpoint(checkpoint), Path(folder)
    step = int(json.loads((Path(checkpoint) / "trainer_state.json").read_text(encoding="utf-8"))["global_step"])
    for path in _checkpoints(folder):
        # They exist if someone resumes from an earlier checkpoint on purpose. Incomplete ones are overwritten.
        if _step(path) > step and run_of_checkpoint(path) == run_id and checkpoint_fault(path) is None:
            logger.warning(
                "%s is after the step that the run resumes from. It is now %s.", path.name, _set_aside(path)
            )
    write_json(folder / RUN_FILE, {"run_id": run_id})
    return run_id


def open_checkpoint(folder: str | os.PathLike[str], run_id: str | None) -> None:
    """Create the folder of a checkpoint; a checkpoint of another run in its place is renamed."""
    folder = Path(folder)
    if folder.is_dir() and any(folder.iterdir()) and run_of_checkpoint(folder) != run_id:
        logger.warning("%s is of another run. It is kept as %s.", folder.name, _set_aside(folder))
    (folder / SEAL_FILE).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if run_id is not None:
        write_json(folder / RUN_FILE, {"run_id": run_id})


def _set_aside(path: Path) -> str:
    """Rename a checkpoint, so that no run uses or overwrites it; returns the new name."""
    stem = f"{path.name}-run-{(run_of_checkpoint(path) or 'unknown')[:8]}"
    number, name = 1, stem
    while (path.parent / name).exists():
        number += 1
        name = f"{stem}-{number}"
    path.rename(path.parent / name)
    return name


def seal_checkpoint(folder: str | os.PathLike[str]) -> Path:
    """Mark a checkpoint as complete, after its files are on the disk; takes about a second per 1-2 gigabytes."""
    folder = Path(folder)
    run_id = run_of_checkpoint(folder)
    (folder / SEAL_FILE).unlink(missing_ok=True)
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "r+b") as file:  # a power loss must not undo what the seal lists
                os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": _digest(path)}
    return write_json(folder / SEAL_FILE, {"run_id": run_id, "files": files})


def checkpoint_fault(folder: str | os.PathLike[str]) -> str | None:
    """Why a checkpoint cannot be used: it is incomplete, unreadable, or holds weights as pickles, which run code."""
    folder = Path(folder)
    try:
        return _fault(folder)
    except OSError as error:  # no permission, or a disk that fails
        place = ""
        if error.filename is not None and Path(os.fsdecode(error.filename)) != folder:
            place = f"{Path(os.fsdecode(error.filename)).name} "
        return f"{place}cannot be read: {error.strerror or error}"


def _fault(folder: Path) -> str | None:
    if not (folder / SEAL_FILE).is_file():
        return f"it is incomplete: it has no {SEAL_FILE}"
    try:
        files = json.loads((folder / SEAL_FILE).read_text(encoding="utf-8"))["files"]
        expected = {str(name): (int(file["size"]), str(file["sha256"])) for name, file in files.items()}
    except OSError:
        raise
    except _UNREADABLE:
        return f"its {SEAL_FILE} is damaged"
    # The Trainer reads the folder and one folder below it per adapter.
    inner = (path for place in folder.iterdir() if place.is_dir() for path in place.iterdir())
    for path in sorted([*folder.iterdir(), *inner]):
        if _PICKLED_WEIGHTS.fullmatch(path.name):
            where = path.relative_to(folder).as_posix()
            return f"{where} is a pickle; weights are loaded only from safetensors: use {convert_command(str(folder))}"
        if path.name.endswith(".safetensors.index.json"):
            try:
                check_index(path)
            except ValueError as error:
                return str(error).rstrip(".")
    # Sizes first: they reveal truncated and missing files without reading gigabytes.
    for name, (size, _) in expected.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    for name, (_, digest) in expected.items():
        try:
            if _digest(folder / name) != digest:
                return f"{name} is damaged"
        except OSError as error:  # a failed read does not name the file
            return f"{name} cannot be read: {error.strerror or error}"
    return None


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _checkpoints(folder: Path, last: int | None = None) -> list[Path]:
    """Newest first, those of later steps than `last` left out."""
    found = [path for path in folder.iterdir() if _step(path) >= 0 and path.is_dir()] if folder.is_dir() else []
    return sorted((path for path in found if last is None or _step(path) <= last), key=_step, reverse=True)


def _current_run(folder: Path) -> str | None:
    """The id of the run that uses an output folder; if none is recorded, that of its checkpoints."""
    try:
        return _read_run_id(folder / RUN_FILE)
    except _UNREADABLE:
        pass
    runs = {run_of_checkpoint(path): path for path in _checkpoints(folder) if _is_sealed(path)}
    if len(runs) > 1:
        names = " and ".join(sorted(path.name for path in runs.values()))
        raise ValueError(
            f"{str(folder)!r} has checkpoints of {len(runs)} runs ({names}, for example) and no {RUN_FILE} that says which "
            "one uses it. Use the path of a checkpoint as resume_from_checkpoint."
        )
    return next(iter(runs), None)


def has_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether the run that uses a folder has sealed a checkpoint there, intact or not; warns if there are only others."""
    folder = Path(folder)
    found = _checkpoints(folder)
    try:
        run_id = _current_run(folder)
    except ValueError:
        return True  # the resume raises the error
    mine = [path for path in found if run_of_checkpoint(path) == run_id]
    if any(_is_sealed(path) for path in mine):
        return True
    if mine:
        logger.warning("%s is incomplete. Training in %s starts from scratch.", mine[0].name, folder)
    elif found:
        logger.warning(
            "%s. Training in %s starts from scratch. Use resume_from_checkpoint='%s' to resume that run instead.",
            _of_others(found),
            folder,
            found[0],
        )
    return False


def _is_sealed(path: Path) -> bool:
    try:
        return (path / SEAL_FILE).is_file()
    except OSError:  # unreadable, not absent
        return True


def _of_others(paths: Sequence[Path]) -> str:
    names = ", ".join(path.name for path in paths)
    return f"{names} {'belongs' if len(paths) == 1 else 'belong'} to another run and {'is' if len(paths) == 1 else 'are'} not used"


def newest_checkpoint(folder: str | os.PathLike[str], *, last: int | None = None) -> str:
    """The newest complete checkpoint of the run that uses the folder; warnings name skipped ones and the reasons."""
    return _newest(Path(folder), _current_run(Path(folder)), last)


def _newest(folder: Path, run_id: str | None, last: int | None) -> str:
    broken: list[str] = []
    found = _checkpoints(folder, last)
    others = [path for path in found if run_of_checkpoint(path) != run_id]
    for path in found:
        if path in others:
            continue
        fault = checkpoint_fault(path)
        if fault is None:
            if broken:
                logger.warning("Skipped %s. Training resumes from %s.", "; ".join(broken), path.name)
            if others:
                logger.warning("%s. Training resumes from %s.", _of_others(others), path.name)
            return str(path)
        broken.append(f"{path.name} ({fault})")
    if broken:
        raise ValueError(
            f"No checkpoint in {str(folder)!r} is complete: {'; '.join(broken)}. Start without resume_from_checkpoint, or "
            "restore a copy."
        )
    if others:
        raise ValueError(
            f"The run that last started in {str(folder)!r} has no checkpoint: {_of_others(others)}. Start without "
            f"resume_from_checkpoint, or use resume_from_checkpoint={str(others[0])!r} to resume that run."
        )
    raise ValueError(f"There is no checkpoint in {str(folder)!r}. Start without resume_from_checkpoint.")


def newest_complete_checkpoint(checkpoint: str | os.PathLike[str]) -> str:
    """A checkpoint if it is complete, else the newest complete one of the same run before it."""
    path = Path(checkpoint)
    if not path.is_dir():
        raise ValueError(
            f"There is no checkpoint {str(checkpoint)!r}. Use its folder, or True for the newest one in output_dir."
        )
    fault = checkpoint_fault(path)
    if fault is None:
        return str(path)
    if _step(path) >= 0:
        return _newest(path.parent, run_of_checkpoint(path), _step(path))
    raise ValueError(f"The checkpoint {str(checkpoint)!r} is not complete: {fault}. Use another one.")


def last_sealed(folder: str | os.PathLike[str], run_id: str | None) -> Path | None:
    """The newest sealed checkpoint of a run; its files are not verified."""
    found = _checkpoints(Path(folder))
    return next((path for path in found if _is_sealed(path) and run_of_checkpoint(path) == run_id), None)


def remove_older(newest: str | os.PathLike[str], *, limit: int | None, best: str | os.PathLike[str] | None) -> None:
    """Remove the oldest checkpoints of a run, never the one just written, the best one, or one of another run."""
    if not limit or limit < 0:
        return
    newest = Path(newest)
    run_id, step = run_of_checkpoint(newest), _step(newest)
    kept = {newest.absolute(), *([] if best is None else [Path(best).absolute()])}
    mine = [path for path in _checkpoints(newest.parent) if run_of_checkpoint(path) == run_id]
    # Later steps are removed first: they were incomplete when the run resumed before them.
    mine.sort(key=lambda path: (_step(path) <= step, _step(path)))
    excess = len(mine) - max(limit, len(kept & {path.absolute() for path in mine}))
    for path in [path for path in mine if path.absolute() not in kept][: max(excess, 0)]:
        shutil.rmtree(path, ignore_errors=True)
