"""`captionrl study build`: the pages and the key of a study."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from PIL import Image

from hf_captionrl.data import open_still
from hf_captionrl.data.options import load_split
from hf_captionrl.evaluation.caption_files import read_files
from hf_captionrl.evaluation.pages import embedded_image, render_html
from hf_captionrl.evaluation.scored_captions import REFERENCES
from hf_captionrl.retrieval.neighbours import normalised
from hf_captionrl.utils.io import atomic_write_text, refuse_file, write_json

if TYPE_CHECKING:
    import datasets

    from hf_captionrl.apps.studies.options import RatingOptions, RetrievalOptions, StudyOptions


# --- Design of human studies: images, questions and their order, and the key, which participants do not see ----------
# Two designs: DiscriTune's retrieval study (section 5.3, Appendix A) and SMILE's rating study (section 3.2). The same
# inputs and seed give a byte-identical study.
#
# Legend: N images, M texts, D features.


def draw_sets(
    features: Any, num_sets: int, *, rows: Sequence[int] | None = None, set_size: int = 10, max_similarity: float = 0.8
) -> list[list[int]]:
    """Disjoint sets of a target and its nearest neighbours, from features `(N, D)` (DiscriTune, Appendix A).

    Neighbours with a cosine above 0.8 are often copies and are skipped, as are targets with too few free neighbours.
    """
    unit = normalised(features)
    order = list(range(len(unit)) if rows is None else rows)
    free = torch.zeros(len(unit), dtype=torch.bool)
    free[order] = True
    sets: list[list[int]] = []
    for target in order:
        if len(sets) == num_sets:
            break
        if not free[target]:
            continue
        scores = (unit @ unit[target]).cpu()
        open_ = free & (scores <= max_similarity)
        open_[target] = False
        if int(open_.sum()) < set_size - 1:
            continue
        scores[~open_] = -torch.inf
        # A stable sort gives the same order of ties on every machine.
        found = [target, *scores.argsort(descending=True, stable=True)[: set_size - 1].tolist()]
        free[found] = False
        sets.append(found)
    return sets


def draw_controls(
    features: Any,
    captions: Sequence[Sequence[str]],
    encode: Callable[[list[str]], Any],
    num_controls: int,
    *,
    rows: Sequence[int],
    set_size: int = 10,
    logit_scale: float = 100.0,
) -> list[tuple[list[int], str]]:
    """Easy control questions: random images, and a human caption that fits only one of them; the surest of 4 per control.

    The target of a group is the image that the scorer finds with the highest probability by one of its captions, whose features
    `encode` gives as `(M, D)`. Groups with a probability of at most 0.9 are skipped.
    """
    unit = normalised(features)
    groups = [list(rows[at : at + set_size]) for at in range(0, len(rows) - set_size + 1, set_size)]
    found: list[tuple[float, list[int], str]] = []
    for group in groups[: 4 * num_controls]:
        asked = [(place, text) for place, row in enumerate(group) for text in captions[row] if text.strip()]
        if not asked:
            continue
        texts = normalised(encode([text for _, text in asked]), "text features").cpu()
        chances = (logit_scale * texts @ unit[group].cpu().T).softmax(dim=1)  # (captions, images)
        own = chances[range(len(asked)), [place for place, _ in asked]]
        best = int(own.argmax())
        place, text = asked[best]
        if float(own[best]) > 0.9:
            found.append((float(own[best]), [group[place], *group[:place], *group[place + 1 :]], text))
    found.sort(key=lambda control: -control[0])
    return [(images, text) for _, images, text in found[:num_controls]]


def _num_blocks(num_sets: int, num_systems: int, block_size: int) -> int:
    return max(num_systems, -(-num_sets * num_systems // block_size))


def deal_blocks(num_sets: int, num_systems: int, block_size: int, rng: random.Random) -> list[list[tuple[int, int]]]:
    """Distribute pairs of a set and a system over blocks of equal size, each set at most once per block."""
    blocks: list[list[tuple[int, int]]] = [[] for _ in range(_num_blocks(num_sets, num_systems, block_size))]
    for number in rng.sample(range(num_sets), num_sets):
        # The smallest blocks, ties at random: sizes differ by at most one.
        chosen = sorted(rng.sample(range(len(blocks)), len(blocks)), key=lambda block: len(blocks[block]))
        for system, block in enumerate(rng.sample(chosen[:num_systems], num_systems)):
            blocks[block].append((number, system))
    return [rng.sample(block, len(block)) for block in blocks]


def _question_id(rng: random.Random) -> str:  # does not reveal the answer
    return f"q{rng.getrandbits(40):010x}"


def retrieval_parts(
    sets: Sequence[Sequence[str]],
    captions: Mapping[str, Sequence[str]],
    controls: Sequence[tuple[Sequence[str], str]],
    *,
    block_size: int = 100,
    controls_per_block: int = 5,
    seed: int = 0,
) -> dict[str, list[dict[str, Any]]]:
    """The blocks of a retrieval study."""
    rng = random.Random(f"retrieval {seed}")
    names = list(captions)

    def question(group: str, system: str | None, caption: str, images: Sequence[str]) -> dict[str, Any]:
        shown = rng.sample(list(images), len(images))
        asked = {"id": _question_id(rng), "group": group, "system": system, "caption": caption}
        return asked | {"images": shown, "right": shown.index(images[0]) + 1}

    parts: dict[str, list[dict[str, Any]]] = {}
    blocks = deal_blocks(len(sets), len(names), block_size, rng)
    width = len(str(len(blocks)))
    for number, block in enumerate(blocks):
        questions = [question(f"set-{s}", names[k], captions[names[k]][s], sets[s]) for s, k in block]
        for step in range(controls_per_block):
            which = (number * controls_per_block + step) % len(controls)
            images, text = controls[which]
            asked = question(f"control-{which}", None, text, images)
            questions.insert(rng.randrange(len(questions) + 1), asked)
        parts[f"block-{number + 1:0{width}}"] = questions
    return parts


def rating_parts(
    image_ids: Sequence[str], captions: Mapping[str, Sequence[str]], *, num_raters: int = 5, seed: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """The pages of a rating study, one per rater: the same captions, each page in another order.

    Captions of one image follow each other; images, and the systems of each image, are shuffled.
    """
    rng = random.Random(f"rating {seed}")
    asked = [
        [
            {"id": _question_id(rng), "group": image_id, "system": name, "caption": texts[i], "images": [image_id]}
            for name, texts in captions.items()
        ]
        for i, image_id in enumerate(image_ids)
    ]
    width = len(str(num_raters))
    return {
        f"rater-{number + 1:0{width}}": [
            dict(question) for group in rng.sample(asked, len(asked)) for question in rng.sample(group, len(group))
        ]
        for number in range(num_raters)
    }


def study_fingerprint(key: Mapping[str, Any]) -> str:
    """Hash of the key, which identifies the study and detects edits."""
    counted = {name: value for name, value in key.items() if name != "fingerprint"}
    text = json.dumps(counted, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- Files of a human study: the key, and the answers of participants ------------------------------------------------

KEY_FILE, PAGES_FOLDER = "key.json", "pages"  # the key is beside the pages, never among them
KEY_FORMAT, ANSWERS_FORMAT = "captionrl study key 1", "captionrl study answers 1"

# Ids of participants, for Python and browsers (flag v); no e-mail address matches it.
PARTICIPANT = r"[A-Za-z0-9._\-]{1,40}"
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"

SCALE_TEXTS: dict[str, tuple[str, str]] = {
    "descriptiveness": ("Descriptiveness", "How much correct detail of the image does it give?"),
    "accuracy": ("Accuracy", "Does everything it says fit the image?"),
    "fluency": ("Fluency", "Is it well-formed and natural?"),
}
RATING_SCALES = tuple(SCALE_TEXTS)  # of SMILE
_MAX_FILE = 2**26
SCORE_WORDS = ("terrible", "poor", "fair", "good", "excellent")  # ratings from 1 to 5 (SMILE, Table 2)
SCORES = len(SCORE_WORDS)


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


def _json(path: Path, format: str, what: str) -> dict[str, Any]:
    # Files of strangers: reading a FIFO would never end.
    if not path.is_file() or path.stat().st_size > _MAX_FILE:
        raise ValueError(f"{what}not a regular file of at most {_MAX_FILE} bytes")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what}not JSON ({error})") from None
    if not isinstance(value, dict) or value.get("format") != format:
        raise ValueError(f"{what}not a file with the format {format!r}")
    return value


def read_key(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The key of a study."""
    path = Path(folder) / KEY_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no {KEY_FILE} in {str(folder)!r}. Name a folder of `captionrl study build`."
        )
    try:
        key = _json(path, KEY_FORMAT, f"{path} is ")
    except ValueError as error:
        raise ValueError(
            f"{error}. Name a folder of `captionrl study build`, or build the study again with the same arguments."
        ) from None
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


def read_answers(path: str | os.PathLike[str], key: Mapping[str, Any]) -> Answers:
    """Read one file of answers and check it with the key."""
    path = Path(path)
    value = _json(path, ANSWERS_FORMAT, "")
    if value.get("study") != key["fingerprint"]:
        raise ValueError(f"answers of another study, {value.get('study')!r:.40}; this one is {key['fingerprint']!r}")
    pages = "|".join(map(re.escape, key["parts"]))
    for name, rule in {"part": pages, "participant": PARTICIPANT, "started": _TIME, "exported": _TIME}.items():
        if not isinstance(value.get(name), str) or not re.fullmatch(rule, value[name]):
            raise ValueError(f"{name} is {value.get(name)!r:.60}, which a page of this study does not write")
    part, answers = value["part"], value.get("answers")
    size, highest = (1, key["settings"]["set_size"]) if key["kind"] == "retrieval" else (len(RATING_SCALES), SCORES)
    asked = {question["id"] for question in key["parts"][part]}
    values: dict[str, tuple[int, ...]] = {}
    milliseconds: dict[str, int] = {}
    for number, answer in enumerate(answers if isinstance(answers, list) else [None], start=1):
        question, given, ms = map((answer if isinstance(answer, dict) else {}).get, ("question", "values", "ms"))
        if not isinstance(question, str) or question not in asked or question in values:
            raise ValueError(f"answer {number} is not to a question of {part} that is still open: {answer!r:.60}")
        numbers = given if isinstance(given, list) else []
        fair = len(numbers) == size and all(type(n) is int and 1 <= n <= highest for n in numbers)
        if not fair or type(ms) is not int or not 0 <= ms < 2**53:
            raise ValueError(f"answer {number} needs {size} whole numbers from 1 to {highest}, and ms: {answer!r:.90}")
        values[question], milliseconds[question] = tuple(numbers), ms
    if value.get("checksum") != answers_checksum(value):
        raise ValueError("the checksum does not match: the file was edited or damaged; ask for it again")
    return Answers(value["participant"], part, values, milliseconds, value["started"], value["exported"], path)


def collect_answers(
    paths: Sequence[str | os.PathLike[str]], key: Mapping[str, Any], *, allow_incomplete: bool = False
) -> tuple[list[Answers], list[dict[str, str]]]:
    """All valid answers, and the rejected files with their reasons.

    Of several downloads of one attempt, the last counts. If a participant attempted a page twice, neither attempt counts,
    because they may be two people, or one who knew the questions.
    """
    found_files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"There is no file or folder {str(path)!r} of answers.")
        found_files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    files = {path.resolve(): path for path in found_files}.values()
    if not files:
        raise ValueError("There are no answers: the folder has no .json file.")
    rejected: list[dict[str, str]] = []

    def reject(path: Path, reason: object) -> None:
        rejected.append({"file": path.name, "reason": str(reason)})

    sessions: dict[tuple[str, str], list[Answers]] = {}
    for path in files:
        try:
            found = read_answers(path, key)
        except (OSError, ValueError) as error:
            reject(path, error)
        else:
            sessions.setdefault((found.participant, found.part), []).append(found)
    kept: list[Answers] = []
    for (participant, part), several in sorted(sessions.items()):
        last = max(several, key=lambda found: (found.exported, len(found.values)))
        total = len(key["parts"][part])
        is_twice = len({found.started for found in several}) > 1
        for found in several:
            if is_twice:
                names = ", ".join(other.path.name for other in several)
                reject(found.path, f"{participant} attempted {part} more than once: {names}")
            elif found is not last:
                reason = f"another download of the same answers of {participant}; the later {last.path.name} counts"
                reject(found.path, reason)
        if is_twice:
            continue
        if len(last.values) < total and not (allow_incomplete and last.values):
            reject(last.path, f"incomplete: {participant} answered {len(last.values)} of {total} questions of {part}")
        else:
            kept.append(last)
    if key["kind"] == "rating":
        # All pages have the same captions, so a participant may answer only one.
        pages_of: dict[str, list[str]] = {}
        for found in kept:
            pages_of.setdefault(found.participant, []).append(found.part)
        for found in kept:
            if len(pages := pages_of[found.participant]) > 1:
                reject(found.path, f"{found.participant} rated the same captions on several pages: {', '.join(pages)}")
        kept = [found for found in kept if len(pages_of[found.participant]) == 1]
    return kept, rejected


# --- The page of a participant: one HTML file that opens from disk, stores the answers in the browser and exports them ---
# The page does not contain the correct answers. It gets captions as JSON and shows them as text, never as markup. Its content
# security policy allows only the page's script and no requests.

TEMPLATES = Path(__file__).parent / "templates"


def render_study_page(
    kind: Literal["retrieval", "rating"],
    questions: Sequence[Mapping[str, Any]],
    image_of: Callable[[str], Image.Image],
    *,
    study: str,
    part: str,
    example: tuple[str, Sequence[str], int] | None = None,
    consent: str = "",
) -> str:
    """Render the page of one participant."""
    max_side = 512 if kind == "rating" else 320  # pixels of the longest side: ten images side by side are smaller
    place: dict[str, int] = {}

    def places(ids: Sequence[str]) -> list[int]:
        # Numbered in order of appearance, because the id of an image may reveal what it shows.
        return [place.setdefault(image_id, len(place)) for image_id in ids]

    asked = [{"id": q["id"], "caption": q["caption"], "images": places(q["images"])} for q in questions]
    shown = None if example is None else {"caption": example[0], "images": places(example[1]), "right": example[2]}
    pictures = []
    for image_id in place:
        small = image_of(image_id).copy()
        small.thumbnail((max_side, max_side))
        pictures.append(embedded_image(small))
    shared: dict[str, Any] = {"kind": kind, "part": part, "pictures": pictures}
    return render_html(
        TEMPLATES,
        "study",
        title="Which image is it?" if kind == "retrieval" else "How good is the caption?",
        num_questions=len(questions),
        set_size=len(questions[0]["images"]),
        scales=[] if kind == "retrieval" else [{"name": name, "text": text} for name, text in SCALE_TEXTS.values()],
        words=SCORE_WORDS,
        consent=[paragraph for paragraph in consent.split("\n") if paragraph.strip()],
        pattern=PARTICIPANT,
        example=shown,
        data={"format": ANSWERS_FORMAT, "study": study, "questions": asked, **shared},
        **shared,
    )


# --- `captionrl study build`: the pages and the key of a study -------------------------------------------------------


def _load(arguments: StudyOptions) -> tuple[datasets.Dataset, list[str], dict[str, list[str]]]:
    """Data set, image ids, and for each system its first caption of each image; human captions are drawn at random."""
    refuse_file(arguments.output)
    if arguments.consent is not None and not arguments.consent.is_file():
        raise FileNotFoundError(f"There is no file {str(arguments.consent)!r} for --consent.")
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
    example: tuple[str, list[str], int] | None = None,
) -> None:
    """Write pages and key, and print a summary."""
    from hf_captionrl.hub import public_values

    # How the study was made, without the folders of this machine.
    made = {"dataset": public_values(arguments.dataset), "split": arguments.split, "seed": arguments.seed}
    key: dict[str, Any] = {"format": KEY_FORMAT, "kind": kind, "systems": list(systems)}
    key |= {"settings": {**made, **settings}, "parts": parts}
    key["fingerprint"] = study_fingerprint(key)
    consent = "" if arguments.consent is None else arguments.consent.read_text(encoding="utf-8")
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
            if Path(part).name != part:
                raise ValueError(
                    f"{output / KEY_FILE} has a part {part!r}, which is not the name of a page. Use another --output."
                )
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
            example=example,
            consent=consent,
        )
        atomic_write_text(pages / f"{part}.html", html)
    sizes = [len(questions) for questions in parts.values()]
    if arguments.json:
        said = {"output": str(output), "kind": kind, "study": key["fingerprint"], "systems": key["systems"]}
        said |= {"pages": [f"{PAGES_FOLDER}/{part}.html" for part in parts], "questions": sum(sizes)}
        print(json.dumps({**said, **key["settings"]}, ensure_ascii=False))
        return
    print(f"{pages}: {len(sizes)} pages of {min(sizes)} to {max(sizes)} questions. Give one to each participant.")
    print(f"{output / KEY_FILE}: the key of study {key['fingerprint']}. Do not share it.")
    print(f"Score the returned files:\n  captionrl study score {output} FILES")


def build_retrieval(arguments: RetrievalOptions) -> None:
    """Build a retrieval study, or the same one again."""
    from hf_captionrl.evaluation.similarity import features_of, similarity_scorer

    dataset, ids, systems = _load(arguments)
    scorer = similarity_scorer(arguments)
    features = features_of(arguments, dataset, scorer, arguments.features)
    order = random.Random(f"images {arguments.seed}").sample(range(len(ids)), len(ids))
    size, wanted = arguments.set_size, arguments.num_sets or 500  # of DiscriTune
    # Twice what one block and the example need, because not every group of images makes a control.
    reserved = 2 * (arguments.controls + 1) * size
    rows = order[: max(len(order) - reserved, 0)]
    sets = draw_sets(features, wanted, rows=rows, set_size=size, max_similarity=arguments.max_similarity)
    if not sets or (arguments.num_sets and len(sets) < wanted):
        raise ValueError(
            f"{len(sets)} sets of {size} could be made of {len(order)} images, but {wanted} are wanted; {reserved} images are "
            "reserved for controls and the example. Lower --num_sets or --set_size, or use more images."
        )
    if len(sets) < wanted:
        print(f"captionrl study: {len(sets)} sets; the paper's {wanted} need {wanted * size} images", file=sys.stderr)
    used = {row for images in sets for row in images}
    controls = draw_controls(
        features,
        dataset["captions"][:],
        scorer.text_features,
        _num_blocks(len(sets), len(systems), arguments.block_size) * arguments.controls + 1,
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
    settings = {"sets": len(sets), "set_size": size, "max_similarity": arguments.max_similarity}
    settings |= {"controls": arguments.controls, "scorer": scorer.signature}
    example = (example_caption, [ids[row] for row in shown], shown.index(example_rows[0]) + 1)
    _write(arguments, "retrieval", systems, settings, parts, dataset, example)


def build_rating(arguments: RatingOptions) -> None:
    """Build a rating study, or the same one again."""
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
    _write(arguments, "rating", systems, settings, parts, dataset)
