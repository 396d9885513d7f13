"""Files of a human study: the key, and the answers of participants."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_captionrl.studies.design import study_fingerprint

__all__ = [
    "ANSWERS_FORMAT",
    "KEY_FILE",
    "KEY_FORMAT",
    "PAGES_FOLDER",
    "PARTICIPANT",
    "RATING_SCALES",
    "SCORES",
    "Answers",
    "answers_checksum",
    "collect_answers",
    "read_answers",
    "read_key",
]

KEY_FILE = "key.json"
"""Beside the folder of pages, never in it."""

PAGES_FOLDER = "pages"
"""Folder of the pages for participants."""

KEY_FORMAT = "captionrl study key 1"
"""Format of the key."""

ANSWERS_FORMAT = "captionrl study answers 1"
"""Format of a file of answers."""

PARTICIPANT = r"[A-Za-z0-9._\-]{1,40}"
"""Regular expression of participant ids, for Python and browsers (flag v); no e-mail address matches it."""

RATING_SCALES = ("descriptiveness", "accuracy", "fluency")
"""Scales of SMILE's rating study."""

_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"

SCORES = 5
"""Best rating; the worst is 1."""


@dataclass(frozen=True)
class Answers:
    """Answers of one participant on one page."""

    participant: str
    part: str
    # For each question id the chosen numbers: a position, or one rating per scale.
    values: Mapping[str, tuple[int, ...]]
    milliseconds: Mapping[str, int]  # for each question id the time until the answer
    started: str  # start time, which distinguishes a second download from a second attempt
    exported: str  # time of the download; both are ISO 8601 in UTC
    path: Path


def read_key(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The key of a study."""
    path = Path(folder) / KEY_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no {KEY_FILE} in {str(folder)!r}. Name a folder of `captionrl study build`."
        )
    try:
        key = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}). Build the study again with the same arguments.") from None
    if not isinstance(key, dict) or key.get("format") != KEY_FORMAT:
        raise ValueError(f"{path} is not a {KEY_FORMAT!r}. Name a folder of `captionrl study build`.")
    if key.get("fingerprint") != study_fingerprint(key):
        raise ValueError(
            f"{path} was changed after it was written: its fingerprint {key.get('fingerprint')!r} does not match. Build "
            "the study again with the same arguments."
        )
    return key


def answers_checksum(value: Mapping[str, Any]) -> str:
    """FNV-1a hash (32 bits) of the answers: detects damage and edits by hand, but not forgery."""
    lines = [str(value[name]) for name in ("study", "part", "participant", "started", "exported")]
    lines += [f"{a['question']} {','.join(map(str, a['values']))} {a['ms']}" for a in value["answers"]]
    state = 0x811C9DC5
    for byte in "\n".join(lines).encode("utf-8", errors="replace"):
        state = (state ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{state:08x}"


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_answers(path: str | os.PathLike[str], key: Mapping[str, Any]) -> Answers:
    """Read one file of answers and check it with the key."""
    path = Path(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); ask for the file again") from None
    if not isinstance(value, dict) or value.get("format") != ANSWERS_FORMAT:
        raise ValueError("not a file of answers, which the page of a study downloads")
    if value.get("study") != key["fingerprint"]:
        raise ValueError(f"answers of another study, {value.get('study')!r:.40}; this one is {key['fingerprint']!r}")
    part, participant, answers = value.get("part"), value.get("participant"), value.get("answers")
    if not isinstance(part, str) or part not in key["parts"]:
        raise ValueError(f"the page is {part!r:.40}, and this study has {', '.join(key['parts'])}")
    if not isinstance(participant, str) or not re.fullmatch(PARTICIPANT, participant):
        raise ValueError(f"the participant is {participant!r:.60}, but must be 1 to 40 letters, digits, '.', '_', '-'")
    size, highest = (1, key["settings"]["set_size"]) if key["kind"] == "retrieval" else (len(RATING_SCALES), SCORES)
    asked = {question["id"] for question in key["parts"][part]}
    values: dict[str, tuple[int, ...]] = {}
    milliseconds: dict[str, int] = {}
    for number, answer in enumerate(answers if isinstance(answers, list) else [None], start=1):
        if (
            not isinstance(answer, dict)
            or not isinstance(answer.get("values"), list)
            or not (_number(answer.get("ms")) and answer["ms"] >= 0)
        ):
            raise ValueError(f"answer {number} is not valid: {answer!r:.60}")
        question = answer.get("question")
        if not isinstance(question, str) or question not in asked:
            raise ValueError(f"answer {number} is to question {question!r:.40}, which {part} does not ask")
        if question in values:
            raise ValueError(f"question {question!r} is answered twice")
        given = answer["values"]
        if len(given) != size or not all(_number(v) and 1 <= v <= highest for v in given):
            raise ValueError(
                f"question {question!r} has the answer {given!r:.60}, but needs {size} whole numbers from 1 to {highest}"
            )
        values[question], milliseconds[question] = tuple(given), answer["ms"]
    started, exported = (str(value.get(name)) for name in ("started", "exported"))
    if not re.fullmatch(_TIME, started) or not re.fullmatch(_TIME, exported):
        raise ValueError(
            f"started and exported are {started!r:.40} and {exported!r:.40}, but must be times in the format of the page"
        )
    if value.get("checksum") != answers_checksum(value):
        raise ValueError("the checksum does not match: the file was edited or damaged; ask for it again")
    return Answers(participant, part, values, milliseconds, started, exported, path)


def _files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += sorted(path.glob("*.json"))
        elif path.is_file():
            found.append(path)
        else:
            raise FileNotFoundError(f"There is no file or folder {str(path)!r} of answers.")
    return list({path.resolve(): path for path in found}.values())


def collect_answers(
    paths: Sequence[str | os.PathLike[str]], key: Mapping[str, Any], *, allow_incomplete: bool = False
) -> tuple[list[Answers], list[dict[str, str]]]:
    """All valid answers, and the rejected files with their reasons.

    Of several downloads of one attempt, the last counts. If a participant attempted a page twice, neither attempt counts,
    because they may be two people, or one who knew the questions.
    """
    files = _files(paths)
    if not files:
        raise ValueError("There are no answers: the folder has no .json file.")
    rejected: list[dict[str, str]] = []
    sessions: dict[tuple[str, str], list[Answers]] = {}
    for path in files:
        try:
            found = read_answers(path, key)
        except (OSError, ValueError) as error:
            rejected.append({"file": path.name, "reason": str(error)})
        else:
            sessions.setdefault((found.participant, found.part), []).append(found)
    kept: list[Answers] = []
    for (participant, part), several in sorted(sessions.items()):
        if len({found.started for found in several}) > 1:
            reason = (
                f"{participant} attempted {part} more than once: {', '.join(found.path.name for found in several)}"
            )
            rejected += [{"file": found.path.name, "reason": reason} for found in several]
            continue
        last = max(several, key=lambda found: (found.exported, len(found.values)))
        reason = f"another download of the same answers of {participant}; the later {last.path.name} counts"
        rejected += [{"file": found.path.name, "reason": reason} for found in several if found is not last]
        total = len(key["parts"][part])
        if len(last.values) < total and not (allow_incomplete and last.values):
            reason = f"incomplete: {participant} answered {len(last.values)} of {total} questions of {part}"
            rejected.append({"file": last.path.name, "reason": reason})
            continue
        kept.append(last)
    if key["kind"] == "rating":
        # All pages have the same captions, so a participant may answer only one.
        names = [found.participant for found in kept]
        twice = [found for found in kept if names.count(found.participant) > 1]
        for found in twice:
            pages = ", ".join(other.part for other in twice if other.participant == found.participant)
            reason = f"{found.participant} rated the same captions on several pages: {pages}"
            rejected.append({"file": found.path.name, "reason": reason})
        kept = [found for found in kept if found not in twice]
    return kept, rejected
