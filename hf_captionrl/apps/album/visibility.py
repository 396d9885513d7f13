"""What the scorer sees of the words of captions: an audit of shared phrases, and why images cannot be told apart.

The evidence for a phrase in an image is the similarity of the image with a caption minus that with the same caption without the
phrase: the projection of the image's features on one direction, the mean over captions that contain the phrase.

Legend: M images, R reference images, P phrases, N captions, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_captionrl.apps.album.options import AlbumSettings
from hf_captionrl.apps.album.phrases import GroupFacts, caption_words, is_content, phrases_of, says, without_phrase
from hf_captionrl.metrics.bootstrap import exact_interval

TextFeatures = Callable[[Sequence[str]], Tensor]
"""Features `(N, D)` of captions."""

FALSE_ALARMS = 0.05
"""Largest share of images without a phrase in which it is called visible. Chosen beforehand, as all numbers of this file."""
MIN_REFERENCES = 40
"""Images without the phrase that the thresholds need: each half of them has a quantile of 0.95."""
_CAPTIONS = 16  # most captions that a direction is computed from


def check_questions(settings: AlbumSettings, image_ids: Sequence[str]) -> None:
    """Refuse blank words, and settings of --audit and --why that have no answer."""
    for name in ("require", "forbid", "why_phrases", "trigger"):
        words = getattr(settings, name)
        if any(not word.strip() for word in ([words] if isinstance(words, str) else words or ())):
            raise ValueError(f"{name} {words!r} has a blank word. Leave it out.")
    if settings.audit and (settings.drop_shared or settings.trigger is not None):
        raise ValueError("audit looks at phrases that drop_shared and trigger replace. Use one of them at a time.")
    if settings.why_phrases and not settings.why:
        raise ValueError(f"why_phrases {settings.why_phrases} have an effect only with why. Use both.")
    if settings.why and len(set(settings.why)) < 2:
        raise ValueError(f"why names one image, {settings.why[0]!r}. Use two or more.")
    if unknown := set(settings.why) - set(image_ids):
        raise ValueError(f"why names {min(unknown)!r}, which is not in the album. Use ids such as {image_ids[0]!r}.")


# --- Evidence --------------------------------------------------------------------------------------------------------


def directions(carriers: Mapping[str, Sequence[str]], text_features: TextFeatures) -> dict[str, Tensor]:
    """The direction `(D,)` of each phrase, from captions that contain it; phrases without such a caption are left out."""
    pairs: list[tuple[str, str, str]] = []  # phrase, caption with it and without it
    for phrase, captions in carriers.items():
        found = [(phrase, text, without_phrase(text, phrase)) for text in dict.fromkeys(captions)]
        found = [pair for pair in found if pair[1] != pair[2]]
        pairs += [found[at] for at in np.linspace(0, len(found) - 1, min(_CAPTIONS, len(found))).astype(int).tolist()]
    if not pairs:
        return {}
    features = text_features([text for _, text, _ in pairs]) - text_features([text for *_, text in pairs])
    rows: dict[str, list[int]] = {}
    for row, (phrase, *_) in enumerate(pairs):
        rows.setdefault(phrase, []).append(row)
    return {phrase: features[mine].mean(0).cpu() for phrase, mine in rows.items()}


# --- The audit of shared phrases -------------------------------------------------------------------------------------

CELLS = ("said_visible", "said_absent", "unsaid_visible", "unsaid_absent", "said_unclear", "unsaid_unclear")
VERDICTS = {
    "in all": "visible in all images: a property of the set",
    "as said": "visible where captions say it, and absent elsewhere",
    "careless": "captions say it where it is not visible",
    "omitted": "visible where captions omit it",
    "careless and omitted": "captions say it where it is not visible, and omit it where it is",
    "cannot tell": "the scorer's evidence is near chance, or there are too few images without the phrase",
}
"""Verdicts on a phrase, and their meanings."""


@dataclass(frozen=True)
class PhraseAudit:
    """What the scorer sees of a phrase that most captions of a group share; rates come with their exact 95 % intervals."""

    group: str  # empty if the whole album is one
    phrase: str
    verdict: str  # a key of `VERDICTS`
    cells: dict[str, list[int]]  # rows of the images, by the names of `CELLS`
    visible: tuple[float, float, float]  # share of the images in which the phrase is visible
    references: int  # images without the phrase
    # Share of the references in which it is called visible by thresholds from their other half; None if there are too few.
    false_alarms: tuple[float, float, float] | None = None
    reason: str = ""  # why the scorer cannot tell


def _upper(references: np.ndarray) -> float:
    """The conformal quantile: a further image without the phrase exceeds it with a probability of at most `FALSE_ALARMS`."""
    place = int(np.ceil((len(references) + 1) * (1 - FALSE_ALARMS)))
    return float(np.sort(references)[place - 1])


def _share(count: Any, total: Any) -> tuple[float, float, float]:
    return (int(count) / int(total), *exact_interval(int(count), int(total))) if total else (0.0, 0.0, 1.0)


def audit_phrase(
    evidence: np.ndarray,
    said: np.ndarray,  # whether the captions of each image say the phrase, (M,)
    references: np.ndarray,
    rows: Sequence[int] | None = None,  # of the images in the album; by default their positions
    *,
    group: str = "",
    phrase: str = "",
) -> PhraseAudit:
    """Judge a phrase by the evidence of images for it, `(M,)`, and by that of images without it, `(R,)`.

    The phrase is visible in an image whose evidence exceeds the 0.95 quantile of the references, absent where it does not exceed
    their median, and unclear between. A rate counts as above chance if its exact 95 % interval is above `FALSE_ALARMS`. The
    scorer cannot tell if the share of visible images is not above chance, or if most images are unclear.
    """
    number, half = len(references), len(references) // 2
    is_enough = number >= MIN_REFERENCES
    high, low = (_upper(references), float(np.median(references))) if is_enough else (np.inf, -np.inf)
    visible = evidence > high
    absent = ~visible & (evidence <= low)
    states = {"visible": visible, "absent": absent, "unclear": ~visible & ~absent}
    words = {"said": said, "unsaid": ~said}
    mask = {name: words[word] & states[state] for name in CELLS for word, state in [name.split("_")]}

    def is_frequent(count: str, others: str) -> bool:
        return _share(mask[count].sum(), mask[count].sum() + mask[others].sum())[1] > FALSE_ALARMS

    share, alarms = _share(visible.sum(), len(evidence)), None
    if is_enough:  # thresholds from one half of the references are tried on the other
        first, second = references[:half], references[half:]
        alarms = _share((first > _upper(second)).sum() + (second > _upper(first)).sum(), number)
    verdict, reason = "cannot tell", ""
    if not is_enough:
        reason = f"{number} images without the phrase, {MIN_REFERENCES} are needed: use --audit_references"
    elif share[1] <= FALSE_ALARMS:
        reason = "the share of visible images is not above chance"
    elif 2 * int(states["unclear"].sum()) > len(evidence):
        reason = "most images are unclear"
    else:
        found = ["careless"] * is_frequent("said_absent", "said_visible")
        found += ["omitted"] * is_frequent("unsaid_visible", "unsaid_absent")
        verdict = " and ".join(found) or ("as said" if is_frequent("unsaid_absent", "unsaid_visible") else "in all")
    rows = range(len(evidence)) if rows is None else rows
    cells = {name: [rows[at] for at in np.flatnonzero(mask[name]).tolist()] for name in CELLS}
    return PhraseAudit(group, phrase, verdict, cells, share, number, alarms, reason)


def audit_phrases(
    shared: Sequence[GroupFacts],
    rows: Sequence[int],  # of the images in the album
    groups: Sequence[str],  # of each image, (M,)
    captions: Sequence[Sequence[str]],  # of each image, (M,)
    features: Tensor,  # of the images, (M, D)
    text_features: TextFeatures,
    references: Tensor | None = None,  # features of further images that do not show what the groups share, (R, D)
) -> list[PhraseAudit]:
    """Audit every phrase that most captions of a group share."""
    found = []
    for fact in shared:
        mine = [at for at, texts in enumerate(captions) if groups[at] == fact.group and texts]
        known = directions(
            {phrase: [text for at in mine for text in captions[at] if says(text, phrase)] for phrase in fact.shared},
            text_features,
        )
        for phrase in fact.shared:
            if (direction := known.get(phrase)) is None:
                none: dict[str, list[int]] = {name: [] for name in CELLS}
                reason = "no caption can be written without it"
                found.append(PhraseAudit(fact.group, phrase, "cannot tell", none, _share(0, 0), 0, reason=reason))
                continue
            said = np.array([any(says(text, phrase) for text in texts) for texts in captions])
            # A group that shares the phrase may omit it where it is visible.
            alike = {other.group for other in shared if any(says(p, phrase) or says(phrase, p) for p in other.shared)}
            pool = features[[at for at, group in enumerate(groups) if group not in alike and not said[at]]]
            if references is not None:
                pool = torch.cat([references.to(pool), pool])
            evidence, chance = ((images @ direction).numpy() for images in (features[mine], pool))
            rows_of = [rows[at] for at in mine]
            found.append(audit_phrase(evidence, said[mine], chance, rows_of, group=fact.group, phrase=phrase))
    return found


# --- Why can these not be told apart? --------------------------------------------------------------------------------

MIN_COSINE = 0.3
"""Cosine of a phrase's direction and the difference of two images from which the phrase is named; chosen on scenes of another seed than
those that measure it."""
SOURCES = ("candidates", "list", "neighbours")
"""Where a phrase is searched, first to last: the captioner's own captions of the bag, phrases of the user, captions of other images."""
_WORDS = 3  # most words of a phrase that is searched

ANSWERS = {
    "told apart": "the caption finds this image among them",
    "near-duplicates": "the scorer does not tell them apart either: do not try",
    "train": "the scorer tells them apart, and the captioner does not",
}
"""Answers for an image, and their meanings."""


@dataclass(frozen=True)
class Difference:
    """Why an image of a bag cannot be told from the most similar other one, and what would tell it from all others."""

    row: int
    other: int  # row of the most similar image of the bag
    answer: str  # a key of `ANSWERS`
    cosine: float  # of the two images
    phrase: str = ""  # empty if no phrase of the search would do
    source: str = ""  # where it was found, one of `SOURCES`
    strength: float = 0.0  # smallest cosine of the phrase's direction and the difference from another image
    said: float = 0.0  # share of the image's own candidates that say it


@dataclass
class PhrasePool:
    """Captions in which a separating phrase is searched, by source, and phrases of the user."""

    candidates: list[list[str]]  # of each image of the bag
    neighbours: list[str] = field(default_factory=list)
    phrases: list[str] = field(default_factory=list)

    def carriers(self) -> tuple[dict[str, list[str]], dict[str, str]]:
        """Captions that contain each phrase, and the source of each phrase."""
        found: dict[str, list[str]] = {}
        source: dict[str, str] = {}
        own = [text for texts in self.candidates for text in texts]
        for name, texts in (("candidates", own), ("neighbours", self.neighbours)):
            for text in dict.fromkeys(texts):
                for phrase in sorted(phrases_of(text, _WORDS)):
                    found.setdefault(phrase, []).append(text)
                    source.setdefault(phrase, name)
        for phrase in self.phrases:
            if phrase not in found and any(is_content(word.folded) for word in caption_words(phrase)):
                found[phrase] = [f"{texts[0]}, {phrase}" for texts in self.candidates if texts]
                source[phrase] = "list"
        return found, source


def explain_bag(
    rows: Sequence[int],  # of the images in the album
    features: Tensor,  # of the images, (M, D)
    captions: Sequence[str],  # of each image
    pool: PhrasePool,
    text_features: TextFeatures,
    copy_threshold: float,  # cosine from which two images are not told apart
) -> list[Difference]:
    """For each image of a bag, why it cannot be told from the most similar other one, and the phrase that would do it."""
    cosines = features @ features.T  # (M, M)
    scores = text_features(captions).cpu() @ features.T  # (M, M)
    carriers, source = pool.carriers()
    known = directions(carriers, text_features)
    names = list(known)
    axes = torch.nn.functional.normalize(torch.stack(list(known.values())), dim=1) if known else features[:0]
    found = []
    for at, row in enumerate(rows):
        others = [other for other in range(len(rows)) if other != at]
        nearest = max(others, key=lambda other: float(cosines[at, other]))
        cosine = float(cosines[at, nearest])
        is_first = bool(captions[at].strip()) and all(scores[at, at] > scores[at, other] for other in others)
        answer = "near-duplicates" if cosine >= copy_threshold else "told apart" if is_first else "train"
        best: tuple[Any, ...] = ()
        if answer != "near-duplicates" and names:
            between = torch.nn.functional.normalize(features[at] - features[others], dim=1)
            strength = (axes @ between.T).amin(1)  # (P,)
            enough = torch.nonzero(strength >= MIN_COSINE).flatten().tolist()
            if enough:
                top = min(enough, key=lambda n: (SOURCES.index(source[names[n]]), -float(strength[n])))
                own = pool.candidates[at]
                said = sum(says(text, names[top]) for text in own) / max(len(own), 1)
                best = (names[top], source[names[top]], float(strength[top]), said)
        found.append(Difference(row, rows[nearest], answer, cosine, *best))
    return found
