"""`captionrl study build`: the pages of a study, and its key."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_captionrl.evaluation.caption_sources import read_files
from hf_captionrl.evaluation.dataset_options import load_split
from hf_captionrl.evaluation.scored_captions import REFERENCES
from hf_captionrl.studies.files import (
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

__all__ = ["build"]

_PAPER_SETS = 500
"""DiscriTune's number of sets."""

_WIDE_SIDE = 512
"""Of the one image of a rating page, in pixels; ten side by side are shown smaller."""


def _check(arguments: argparse.Namespace) -> str:
    """What can be said before anything slow; the text to agree to."""
    if arguments.output.exists() and not arguments.output.is_dir():
        raise ValueError(f"--output {str(arguments.output)!r} is a file. Name a folder.")
    if arguments.kind == "retrieval":
        if not 2 <= arguments.set_size <= 10:
            raise ValueError(f"--set_size is {arguments.set_size}; there are keys for 2 to 10 images.")
        if arguments.controls < 0:
            raise ValueError(f"--controls is {arguments.controls}, but must be at least 0.")
    if arguments.consent is None:
        return ""
    if not arguments.consent.is_file():
        raise FileNotFoundError(f"There is no file {str(arguments.consent)!r} for --consent.")
    return str(arguments.consent.read_text(encoding="utf-8"))


def _systems(
    arguments: argparse.Namespace, ids: Sequence[str], all_ids: set[str], dataset: Any
) -> dict[str, list[str]]:
    """For each system its first caption of each image; people's are drawn at random."""
    found = {
        file.name: [group[0] for group in file.aligned(ids, all_ids)]
        for file in read_files(arguments.captions, arguments.names)
    }
    if arguments.references:
        rng = random.Random(f"references {arguments.seed}")
        groups = dataset["captions"][:]
        empty = next((ids[row] for row, group in enumerate(groups) if not group), None)
        if empty is not None:
            raise ValueError(f"Image {empty!r} has no human caption. Leave --references out.")
        found[REFERENCES] = [rng.choice(group) for group in groups]
    return found


def _write(
    arguments: argparse.Namespace,
    key: dict[str, Any],
    dataset: datasets.Dataset,
    *,
    consent: str,
    example: tuple[str, list[str], int] | None = None,
) -> None:
    """Write pages and key, and say so."""
    from hf_captionrl.data import open_still
    from hf_captionrl.io import atomic_write_text, write_json
    from hf_captionrl.studies.design import study_fingerprint
    from hf_captionrl.studies.page import render_study_page

    key["fingerprint"] = study_fingerprint(key)
    output: Path = arguments.output
    pages = output / PAGES_FOLDER
    if (output / KEY_FILE).exists():
        before = read_key(output)
        if before["fingerprint"] != key["fingerprint"] and not arguments.overwrite:
            raise ValueError(
                f"{output} holds another study, {before['fingerprint']}, and this one is {key['fingerprint']}. Answers to "
                "that one could no longer be scored: choose another --output, or pass --overwrite."
            )
        # Only pages of that study: the folder may hold what is not ours.
        for part in before["parts"].keys() - key["parts"].keys():
            (pages / f"{part}.html").unlink(missing_ok=True)
    row_of = {str(image_id): row for row, image_id in enumerate(dataset["image_id"][:])}
    # The key first: pages that nobody can score must not be about.
    write_json(output / KEY_FILE, key)
    for part, questions in key["parts"].items():
        html = render_study_page(
            key["kind"],
            questions,
            lambda image_id: open_still(dataset[row_of[image_id]]),
            study=key["fingerprint"],
            part=part,
            answers_format=ANSWERS_FORMAT,
            participant_pattern=PARTICIPANT,
            example=example,
            consent=consent,
            **({"max_side": _WIDE_SIDE} if key["kind"] == "rating" else {}),
        )
        atomic_write_text(pages / f"{part}.html", html)
    sizes = [len(questions) for questions in key["parts"].values()]
    said = {
        "output": str(output),
        "kind": key["kind"],
        "study": key["fingerprint"],
        "systems": key["systems"],
        "pages": [f"{PAGES_FOLDER}/{part}.html" for part in key["parts"]],
        "questions": sum(sizes),
        **key["settings"],
    }
    if arguments.json:
        print(json.dumps(said, ensure_ascii=False))
        return
    print(f"{pages}: {len(sizes)} pages of {min(sizes)} to {max(sizes)} questions. Give each participant one.")
    print(f"{output / KEY_FILE}: the key of study {key['fingerprint']}. Keep it to yourself.")
    print(f"What participants send back:\n  captionrl study score {output} FILES")


def _settings(arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """How the study was made, without this machine's folders."""
    from hf_captionrl.hub import public_values

    return {
        "dataset": public_values(arguments.dataset),
        "split": arguments.split,
        "seed": arguments.seed,
        **more,
    }


def _retrieval(arguments: argparse.Namespace, consent: str) -> None:
    from hf_captionrl.evaluation.similarity import features_of, similarity_scorer
    from hf_captionrl.studies.design import draw_controls, draw_sets, retrieval_parts

    split = load_split(arguments, quarantine_path=arguments.output / "quarantine.jsonl")
    dataset = split.dataset
    ids = [str(i) for i in dataset["image_id"][:]]
    systems = _systems(arguments, ids, split.all_ids, dataset)
    scorer = similarity_scorer(arguments)
    features = features_of(arguments, dataset, scorer, "image")
    size, wanted = arguments.set_size, arguments.num_sets or _PAPER_SETS
    order = random.Random(f"images {arguments.seed}").sample(range(len(ids)), len(ids))
    # Twice the controls of one block and the example: not every group of images makes a control.
    kept_back = 2 * (arguments.controls + 1) * size
    sets = draw_sets(
        features,
        wanted,
        rows=order[: max(len(order) - kept_back, 0)],
        set_size=size,
        max_similarity=arguments.max_similarity,
    )
    if not sets or (arguments.num_sets and len(sets) < wanted):
        raise ValueError(
            f"Of {len(ids)} images {len(sets)} sets of {size} could be made, and {wanted} are wanted; {kept_back} images "
            "are kept back for controls and the example. Lower --num_sets or --set_size, or use more images."
        )
    if len(sets) < wanted:
        print(
            f"captionrl study: {len(sets)} sets; the paper's {wanted} would take {wanted * size} images",
            file=sys.stderr,
        )
    used = {row for images in sets for row in images}
    blocks = max(len(systems), -(-len(sets) * len(systems) // arguments.block_size))
    captions = dataset["captions"][:]
    controls = draw_controls(
        features,
        captions,
        lambda texts: scorer.text_features(texts),
        blocks * arguments.controls + 1,
        rows=[row for row in order if row not in used],
        set_size=size,
        logit_scale=scorer.logit_scale,
    )
    if len(controls) < arguments.controls + 1:
        raise ValueError(
            f"{len(controls)} controls could be made, and a block takes {arguments.controls} and the example one: a control "
            "needs a human caption by which the scorer finds its image with more than .9. Lower --controls or --num_sets."
        )
    # The plainest is the example.
    (example_rows, example_caption), *controls = controls
    shown = random.Random(f"example {arguments.seed}").sample(example_rows, size)
    key = {
        "format": KEY_FORMAT,
        "kind": "retrieval",
        "systems": list(systems),
        "settings": _settings(
            arguments,
            sets=len(sets),
            set_size=size,
            max_similarity=arguments.max_similarity,
            controls=arguments.controls,
            scorer=scorer.signature,
        ),
        "parts": retrieval_parts(
            [[ids[row] for row in images] for images in sets],
            {name: [texts[images[0]] for images in sets] for name, texts in systems.items()},
            [([ids[row] for row in images], text) for images, text in controls],
            block_size=arguments.block_size,
            controls_per_block=arguments.controls,
            seed=arguments.seed,
        ),
    }
    example = (example_caption, [ids[row] for row in shown], shown.index(example_rows[0]) + 1)
    _write(arguments, key, dataset, consent=consent, example=example)


def _rating(arguments: argparse.Namespace, consent: str) -> None:
    from hf_captionrl.studies.design import rating_parts

    split = load_split(arguments, quarantine_path=arguments.output / "quarantine.jsonl")
    dataset = split.dataset
    ids = [str(i) for i in dataset["image_id"][:]]
    systems: Mapping[str, list[str]] = _systems(arguments, ids, split.all_ids, dataset)
    if len(ids) < arguments.num_images:
        raise ValueError(
            f"The split has {len(ids)} images, and {arguments.num_images} are wanted. Lower --num_images."
        )
    rows = random.Random(f"images {arguments.seed}").sample(range(len(ids)), arguments.num_images)
    key = {
        "format": KEY_FORMAT,
        "kind": "rating",
        "systems": list(systems),
        "settings": _settings(
            arguments, images=arguments.num_images, raters=arguments.num_raters, scales=list(RATING_SCALES)
        ),
        "parts": rating_parts(
            [ids[row] for row in rows],
            {name: [texts[row] for row in rows] for name, texts in systems.items()},
            num_raters=arguments.num_raters,
            seed=arguments.seed,
        ),
    }
    _write(arguments, key, dataset, consent=consent)


def build(arguments: argparse.Namespace) -> None:
    """Make a study, or the same one again."""
    consent = _check(arguments)
    read_files(arguments.captions, arguments.names)  # before anything slow
    if arguments.kind == "retrieval":
        _retrieval(arguments, consent)
    else:
        _rating(arguments, consent)
