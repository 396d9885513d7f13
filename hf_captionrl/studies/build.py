"""`captionrl study build`: the pages and the key of a study."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from hf_captionrl.evaluation.caption_sources import read_files
from hf_captionrl.evaluation.dataset_options import load_split
from hf_captionrl.evaluation.scored_captions import REFERENCES
from hf_captionrl.studies.answer_files import (
    ANSWERS_FORMAT,
    KEY_FILE,
    KEY_FORMAT,
    PAGES_FOLDER,
    PARTICIPANT,
    RATING_SCALES,
    read_key,
)

if TYPE_CHECKING:
    import datasets
    import torch

    from hf_captionrl.studies.options import RatingOptions, RetrievalOptions, StudyOptions

__all__ = ["build_rating", "build_retrieval"]

_PAPER_SETS = 500
"""Number of sets in DiscriTune."""

_WIDE_SIDE = 512
"""Longest side of the single image of a rating page, in pixels; ten images side by side are smaller."""


def _consent(arguments: StudyOptions) -> str:
    """The text to agree to; checks the options that both designs share."""
    if arguments.output.exists() and not arguments.output.is_dir():
        raise ValueError(f"--output {str(arguments.output)!r} is a file. Name a folder.")
    if arguments.consent is None:
        return ""
    if not arguments.consent.is_file():
        raise FileNotFoundError(f"There is no file {str(arguments.consent)!r} for --consent.")
    return arguments.consent.read_text(encoding="utf-8")


def _load(arguments: StudyOptions) -> tuple[datasets.Dataset, list[str], dict[str, list[str]]]:
    """Data set, image ids, and for each system its first caption of each image; human captions are drawn at random."""
    files = read_files(arguments.captions, arguments.names)
    split = load_split(arguments, quarantine_path=arguments.output / "quarantine.jsonl")
    ids = [str(i) for i in split.dataset["image_id"][:]]
    systems = {file.name: [group[0] for group in file.aligned(ids, split.all_ids)] for file in files}
    if arguments.references:
        rng = random.Random(f"references {arguments.seed}")
        groups = split.dataset["captions"][:]
        empty = next((ids[row] for row, group in enumerate(groups) if not group), None)
        if empty is not None:
            raise ValueError(f"Image {empty!r} has no human caption. Leave --references out.")
        systems[REFERENCES] = [rng.choice(group) for group in groups]
    return split.dataset, ids, systems


def _write(
    arguments: StudyOptions,
    kind: Literal["retrieval", "rating"],
    systems: Mapping[str, Any],
    settings: Mapping[str, Any],
    parts: dict[str, list[dict[str, Any]]],
    dataset: datasets.Dataset,
    *,
    consent: str,
    example: tuple[str, list[str], int] | None = None,
) -> None:
    """Write pages and key, and print a summary."""
    from hf_captionrl.data import open_still
    from hf_captionrl.hub import public_values
    from hf_captionrl.io import atomic_write_text, write_json
    from hf_captionrl.studies.design import study_fingerprint
    from hf_captionrl.studies.participant_page import render_study_page

    # How the study was made, without the folders of this machine.
    made = {"dataset": public_values(arguments.dataset), "split": arguments.split, "seed": arguments.seed}
    key: dict[str, Any] = {
        "format": KEY_FORMAT,
        "kind": kind,
        "systems": list(systems),
        "settings": {**made, **settings},
        "parts": parts,
    }
    key["fingerprint"] = study_fingerprint(key)
    output = arguments.output
    pages = output / PAGES_FOLDER
    if (output / KEY_FILE).exists():
        before = read_key(output)
        if before["fingerprint"] != key["fingerprint"] and not arguments.overwrite:
            raise ValueError(
                f"{output} holds another study, {before['fingerprint']}; this one is {key['fingerprint']}. Use another --output, "
                "or --overwrite if answers to the old one need not be scored."
            )
        # Delete only pages of that study: the folder may hold other files.
        for part in before["parts"].keys() - parts.keys():
            (pages / f"{part}.html").unlink(missing_ok=True)
    row_of = {str(image_id): row for row, image_id in enumerate(dataset["image_id"][:])}
    # The key first, so that there are never pages that cannot be scored.
    write_json(output / KEY_FILE, key)
    for part, questions in parts.items():
        html = render_study_page(
            kind,
            questions,
            lambda image_id: open_still(dataset[row_of[image_id]]),
            study=key["fingerprint"],
            part=part,
            answers_format=ANSWERS_FORMAT,
            participant_pattern=PARTICIPANT,
            example=example,
            consent=consent,
            **({"max_side": _WIDE_SIDE} if kind == "rating" else {}),
        )
        atomic_write_text(pages / f"{part}.html", html)
    sizes = [len(questions) for questions in parts.values()]
    said = {
        "output": str(output),
        "kind": kind,
        "study": key["fingerprint"],
        "systems": key["systems"],
        "pages": [f"{PAGES_FOLDER}/{part}.html" for part in parts],
        "questions": sum(sizes),
        **key["settings"],
    }
    if arguments.json:
        print(json.dumps(said, ensure_ascii=False))
        return
    print(f"{pages}: {len(sizes)} pages of {min(sizes)} to {max(sizes)} questions. Give one to each participant.")
    print(f"{output / KEY_FILE}: the key of study {key['fingerprint']}. Do not share it.")
    print(f"Score the returned files:\n  captionrl study score {output} FILES")


def _draw_sets(arguments: RetrievalOptions, features: torch.Tensor, order: Sequence[int]) -> list[list[int]]:
    from hf_captionrl.studies.design import draw_sets

    size, wanted = arguments.set_size, arguments.num_sets or _PAPER_SETS
    # Twice what one block and the example need, because not every group of images makes a control.
    reserved = 2 * (arguments.controls + 1) * size
    sets = draw_sets(
        features,
        wanted,
        rows=order[: max(len(order) - reserved, 0)],
        set_size=size,
        max_similarity=arguments.max_similarity,
    )
    if not sets or (arguments.num_sets and len(sets) < wanted):
        raise ValueError(
            f"{len(sets)} sets of {size} could be made of {len(order)} images, but {wanted} are wanted; {reserved} images are "
            "reserved for controls and the example. Lower --num_sets or --set_size, or use more images."
        )
    if len(sets) < wanted:
        print(
            f"captionrl study: {len(sets)} sets; the paper's {wanted} need {wanted * size} images",
            file=sys.stderr,
        )
    return sets


def build_retrieval(arguments: RetrievalOptions) -> None:
    """Build a retrieval study, or the same one again."""
    if not 2 <= arguments.set_size <= 10:
        raise ValueError(
            f"--set_size is {arguments.set_size}, but must lie in 2 to 10: there are keys for 2 to 10 images."
        )
    if arguments.controls < 0:
        raise ValueError(f"--controls is {arguments.controls}, but must be at least 0.")
    consent = _consent(arguments)

    from hf_captionrl.evaluation.similarity import features_of, similarity_scorer
    from hf_captionrl.studies.design import draw_controls, retrieval_parts

    dataset, ids, systems = _load(arguments)
    scorer = similarity_scorer(arguments)
    features = features_of(arguments, dataset, scorer, arguments.features)
    size = arguments.set_size
    order = random.Random(f"images {arguments.seed}").sample(range(len(ids)), len(ids))
    sets = _draw_sets(arguments, features, order)
    used = {row for images in sets for row in images}
    blocks = max(len(systems), -(-len(sets) * len(systems) // arguments.block_size))
    controls = draw_controls(
        features,
        dataset["captions"][:],
        lambda texts: scorer.text_features(texts),
        blocks * arguments.controls + 1,
        rows=[row for row in order if row not in used],
        set_size=size,
        logit_scale=scorer.logit_scale,
    )
    if len(controls) < arguments.controls + 1:
        raise ValueError(
            f"{len(controls)} controls could be made, but a block needs {arguments.controls} and the example 1. For a "
            "control, the scorer must find the image of a human caption with a probability above 0.9. Lower --controls or "
            "--num_sets."
        )
    # The surest control is the example.
    (example_rows, example_caption), *controls = controls
    shown = random.Random(f"example {arguments.seed}").sample(example_rows, size)
    parts = retrieval_parts(
        [[ids[row] for row in images] for images in sets],
        {name: [texts[images[0]] for images in sets] for name, texts in systems.items()},
        [([ids[row] for row in images], text) for images, text in controls],
        block_size=arguments.block_size,
        controls_per_block=arguments.controls,
        seed=arguments.seed,
    )
    settings = {
        "sets": len(sets),
        "set_size": size,
        "max_similarity": arguments.max_similarity,
        "controls": arguments.controls,
        "scorer": scorer.signature,
    }
    example = (example_caption, [ids[row] for row in shown], shown.index(example_rows[0]) + 1)
    _write(arguments, "retrieval", systems, settings, parts, dataset, consent=consent, example=example)


def build_rating(arguments: RatingOptions) -> None:
    """Build a rating study, or the same one again."""
    consent = _consent(arguments)

    from hf_captionrl.studies.design import rating_parts

    dataset, ids, systems = _load(arguments)
    if len(ids) < arguments.num_images:
        raise ValueError(
            f"The split has {len(ids)} images, but {arguments.num_images} are wanted. Lower --num_images."
        )
    rows = random.Random(f"images {arguments.seed}").sample(range(len(ids)), arguments.num_images)
    parts = rating_parts(
        [ids[row] for row in rows],
        {name: [texts[row] for row in rows] for name, texts in systems.items()},
        num_raters=arguments.num_raters,
        seed=arguments.seed,
    )
    settings = {"images": arguments.num_images, "raters": arguments.num_raters, "scales": list(RATING_SCALES)}
    _write(arguments, "rating", systems, settings, parts, dataset, consent=consent)
