"""Decisions of the review: keep or drop a bag, one line per decision, flushed to disk immediately.

The last line about a bag counts; a null decision undoes the previous ones. Readers skip an incomplete last line after a crash,
and the next writer removes it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from hf_captionrl.io import LineFile
from hf_captionrl.retrieval.bag_files import BagFile

__all__ = ["REASONS", "Decision", "DecisionWriter", "bag_id", "check_decision", "drop_bags", "read_decisions"]

REASONS: dict[str, str] = {
    "duplicates": "The same image, or no difference that can be named",
    "too_easy": "Any caption distinguishes them",
    "text_or_names": "Only written text or a name differs",
    "bad_image": "A broken or unfit image",
    "other": "Another reason",
}
"""Reasons to drop a bag, in the order of the keys 1 to 5."""

_SHAPE = 'A line is {"bag": "...", "decision": "keep", "drop" or null, "reason": null or one of the reasons}.'


@dataclass(frozen=True)
class Decision:
    """One line."""

    bag: str  # id of the bag, see [`bag_id`]
    decision: Literal["keep", "drop"] | None  # `"keep"`, `"drop"`, or None to undo earlier decisions
    reason: str | None = None  # why the bag is dropped, a key of `REASONS`; None if no reason was given
    time: str | None = None  # UTC, as ISO 8601


def bag_id(image_ids: Sequence[str]) -> str:
    """Id of a bag: a hash of its images, so that a rebuilt benchmark keeps its decisions."""
    names = json.dumps([str(image_id) for image_id in image_ids])
    return f"{len(image_ids)}-{hashlib.sha256(names.encode('ascii')).hexdigest()[:12]}"


def check_decision(value: Any, where: str) -> Decision:
    """A decision from parsed JSON."""
    if not isinstance(value, dict) or not isinstance(value.get("bag"), str) or not value["bag"]:
        raise ValueError(f"{where} does not name a bag: {value!r:.80}. {_SHAPE}")
    decision, reason, time = value.get("decision"), value.get("reason"), value.get("time")
    if decision not in ("keep", "drop", None) or "decision" not in value:
        raise ValueError(f"{where}: the decision is {decision!r:.40}. {_SHAPE}")
    if reason is not None and (decision != "drop" or reason not in REASONS):
        raise ValueError(
            f"{where}: the reason is {reason!r:.40} with the decision {decision!r}. Only dropped bags have a reason. Use one of "
            f"{', '.join(REASONS)}."
        )
    if time is not None and not isinstance(time, str):
        raise ValueError(f"{where}: the time is {time!r:.40}, not text. {_SHAPE}")
    return Decision(value["bag"], decision, reason, time)


def _parse(line: bytes, where: str) -> Decision:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): {line[:60]!r}. {_SHAPE}") from None
    return check_decision(value, where)


def read_decisions(path: str | os.PathLike[str]) -> list[Decision]:
    """All decisions of a file, oldest first."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {str(path)!r}. `captionrl truematch review` writes one.")
    lines = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number == len(lines):  # no line break at its end
            try:
                json.loads(line)
            except ValueError:
                continue
        found.append(_parse(line, f"{path}, line {number},"))
    return found


def drop_bags(file: BagFile, decisions: Iterable[Decision]) -> BagFile:
    """The bags without those whose last decision is "drop"; undecided bags stay."""
    last = {decision.bag: decision.decision for decision in decisions}
    kept = [number for number, bag in enumerate(file.bags) if last.get(bag_id(bag)) != "drop"]
    if not kept:
        raise ValueError(f"All {len(file.bags)} bags are dropped, so the benchmark is empty. Keep at least one.")
    return BagFile(
        [file.bags[number] for number in kept],
        [file.similarities[number] for number in kept],
        file.signature,
        file.features,
        file.kind,
    )


class DecisionWriter(LineFile):
    """Appends decisions to a file, which it locks; a context manager. `decisions` holds all of the file, oldest first."""

    busy = "Stop the other review first."

    def _begin(self, data: bytes) -> None:
        self.decisions = read_decisions(self.path)
        whole = data.rfind(b"\n") + 1
        torn = data[whole:]
        self.truncate(whole)
        if torn.strip() and self.decisions and self._is_whole(torn):
            self.append_bytes(torn.strip() + b"\n")  # only its line break was missing

    @staticmethod
    def _is_whole(line: bytes) -> bool:
        try:
            json.loads(line)
        except ValueError:
            return False
        return True

    def append(self, decision: Decision) -> Decision:
        """Add a decision; it is on disk when this returns."""
        written = Decision(
            decision.bag,
            decision.decision,
            decision.reason,
            decision.time or datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self.append_bytes((json.dumps(vars(written)) + "\n").encode("ascii"))
        self.decisions.append(written)
        return written
