"""`captionrl study score`: score the answers of participants."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hf_captionrl.studies.answer_files import RATING_SCALES, collect_answers, read_key

if TYPE_CHECKING:
    from hf_captionrl.studies.answer_files import Answers
    from hf_captionrl.studies.options import ScoreOptions

__all__ = ["score", "score_answers"]


def score_answers(
    key: Mapping[str, Any], answers: Sequence[Answers], *, max_wrong_controls: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Join answers with the key and score them; adds the median seconds per question of each participant."""
    from statistics import median

    from hf_captionrl.studies.accuracy_and_ratings import Pick, Rating, score_picks, score_ratings

    joined = [
        (found, question, found.values[question["id"]])
        for found in answers
        for question in key["parts"][found.part]
        if question["id"] in found.values
    ]
    systems = key["systems"]
    if key["kind"] == "retrieval":
        picks = [
            Pick(found.participant, found.part, q["group"], q["system"], values[0], q["right"])
            for found, q, values in joined
        ]
        size = key["settings"]["set_size"]
        result = score_picks(picks, systems, set_size=size, max_wrong_controls=max_wrong_controls, seed=seed)
    else:
        ratings = [Rating(found.participant, q["group"], q["system"], values) for found, q, values in joined]
        result = score_ratings(ratings, systems, scales=RATING_SCALES, seed=seed)
    times: dict[str, list[int]] = {}
    for found in answers:
        times.setdefault(found.participant, []).extend(found.milliseconds.values())
    for entry in result["participants"]:
        entry["seconds_per_question"] = round(median(times[entry["participant"]]) / 1000, 1)
    return result


def score(arguments: ScoreOptions) -> None:
    """Score the answers, and write the tables."""
    if arguments.max_wrong_controls < 0:
        raise ValueError(f"--max_wrong_controls is {arguments.max_wrong_controls}, but must be at least 0.")
    key = read_key(arguments.folder)
    answers, rejected = collect_answers(arguments.answers, key, allow_incomplete=arguments.allow_incomplete)
    for entry in rejected:
        print(f"captionrl study: {entry['file']} does not count: {entry['reason']}", file=sys.stderr)
    if not answers:
        told = "; ".join(f"{entry['file']}: {entry['reason']}" for entry in rejected[:3])
        raise ValueError(f"None of {len(rejected)} files of answers counts ({told}). Ask for valid files.")

    from hf_captionrl.io import atomic_write_text, to_plain, write_json
    from hf_captionrl.studies.result_pages import study_html, study_markdown

    result = {
        "kind": key["kind"],
        "study": key["fingerprint"],
        **score_answers(key, answers, max_wrong_controls=arguments.max_wrong_controls, seed=arguments.seed),
        "rejected": rejected,
        "files": sorted(found.path.name for found in answers),
        "settings": key["settings"],
    }
    folder = arguments.output_dir or arguments.folder
    markdown = study_markdown(result)
    write_json(folder / "results.json", result)
    atomic_write_text(folder / "results.md", markdown)
    atomic_write_text(folder / "results.html", study_html(result))
    if arguments.json:
        print(json.dumps(to_plain(result), ensure_ascii=False))
        return
    print(markdown)
    print(f"Written to {folder}: results.json, results.md, results.html")
