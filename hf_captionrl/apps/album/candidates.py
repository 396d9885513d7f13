"""Finetunes a captioner on an album by self-retrieval, and keeps the result only if a held-out scorer prefers it.

Legend: M images, D features.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from hf_captionrl.apps.album.settings import CandidateOptions, check_candidate_options
from hf_captionrl.apps.album.sources import opened_chunks, read_images
from hf_captionrl.captioners import Captioner
from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.captioners.head_tap import evaluating
from hf_captionrl.captioners.pipeline import ChosenImages, generate_captions
from hf_captionrl.captioners.prompts import contrastive_prompt, encode_with_prompts
from hf_captionrl.metrics.suites import spoken
from hf_captionrl.retrieval import FeatureCache, Scorer, nearest_neighbours
from hf_captionrl.retrieval.ranking import duplicate_images, ranks, ranks_from_scores, tie_copies
from hf_captionrl.text.degenerate_captions import degenerate
from hf_captionrl.trainers import SelfRetrievalConfig, SelfRetrievalTrainer
from hf_captionrl.trainers.checkpoints import has_checkpoint
from hf_captionrl.utils.parts import seed_of_batch

# --- Words of a caption with their positions, and the English function words -----------------------------------------

DETERMINERS = frozenset("a an the this that these those its my your our his her their some one".split())
"""Words that need a noun."""
JOINTS = frozenset(
    "and or of is are was were has have with in on at to by from near for while as that which who".split()
)
"""Words that join what follows them to what precedes them."""
FUNCTION_WORDS = (
    DETERMINERS | JOINTS | frozenset("be there it there's it's being over under into up down very".split())
)
"""English words without content."""

# Frequent words of other languages in Latin script that English captions do not contain.
_OTHER_LANGUAGES = frozenset(
    "un une le la les du des de et est il elle avec sur dans y el los las una con en del por para uno gli che di da della "
    "um uma com o os ao der das ein eine einen und mit auf im ist het een van met op och ett på og egy és az jest w z".split()
)


class Word(NamedTuple):
    """A word or a punctuation mark of a caption."""

    start: int
    end: int  # the character after its last one
    folded: str  # the word without case


@cache
def _pattern() -> re.Pattern[str]:
    """Times and numbers, words with hyphens and apostrophes, single punctuation marks."""
    # \w lacks combining marks, such as the vowel signs of Hindi, and the joiners of Hindi and Persian. Marks above U+FFFF
    # are left out: with them, `re` would search the set one by one.
    marks = "".join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c)[0] == "M")
    letter = rf"(?:\w|[\u200c\u200d{marks}])"
    return re.compile(rf"\d+(?:[.,:/]\d+)+{letter}*|{letter}+(?:['’-]{letter}+)*|[^\w\s]")


def caption_words(text: str) -> list[Word]:
    """The words and punctuation marks of a text; a run of letters without spaces is one word in every script."""
    return [Word(*found.span(), found[0].casefold()) for found in _pattern().finditer(text)]


def is_content(word: str) -> bool:
    """Whether a word is neither punctuation nor an English function word."""
    return word[0].isalnum() and word not in FUNCTION_WORDS


def is_english(words: Sequence[Word]) -> bool:
    """Whether English grammar may be applied to a caption; False in doubt."""
    known = {word.folded for word in words}
    if known & _OTHER_LANGUAGES:
        return False
    return all(word.isascii() for word in known) or bool(known & {"the", "of", "with", "and"})


# --- Scripts of captions, and languages by py3langid if it is installed (extra `[language]`); it needs no network ----
# Legend: N texts.

logger = logging.getLogger(__name__)

LANGUAGES = frozenset(
    "ar bn cs da de el en es fa fi fr he hi hr hu id it ja ko nl no pl pt ro ru sv sw te th tr uk vi zh".split()
)
"""Languages that captions are compared with: those of Crossmodal-3600 that py3langid knows. Among all 139, rare languages win for
captions of three words."""
MARGIN = 3.0
"""Log-likelihood in nats by which another language must be more likely. The true language of short captions is within 2.3 nats."""


def script_of(text: str) -> str | None:
    """Most frequent script of the letters of a text, such as `LATIN` or `CYRILLIC`; None without letters."""
    if text.isascii():  # most captions, whose letters need no names
        return "LATIN" if any(map(str.isalpha, text)) else None
    counts = Counter(name for letter in text if letter.isalpha() and (name := _script_of_letter(letter)))
    return counts.most_common(1)[0][0] if counts else None


@cache
def _script_of_letter(letter: str) -> str:
    """Empty for a letter without a name."""
    return unicodedata.name(letter, "").partition(" ")[0]


class LanguageIdentifier:
    """Compares the languages of captions; a caption of two or three words often fits several."""

    def __init__(self, identifier: Any, languages: Collection[str] = LANGUAGES) -> None:
        self._identifier = identifier
        self._identifier.set_languages(sorted(languages))

    def is_foreign(self, text: str, languages: Collection[str]) -> bool:
        """Whether a text is clearly in none of some languages."""
        if not languages or script_of(text) is None or self._identifier.classify(text)[0] in languages:
            return False
        scores = dict(self._identifier.rank(text))
        return bool(max(scores.values()) - max(scores[language] for language in languages) > MARGIN)

    def languages_of(self, groups: Sequence[Iterable[str]]) -> list[set[str]]:
        """Languages of groups of texts. A text that may be in the most frequent language is in that language."""
        found = [
            [(text, self._identifier.classify(text)[0]) for text in texts if script_of(text) is not None]
            for texts in groups
        ]
        counts = Counter(language for mine in found for _, language in mine)
        main = max(counts, key=lambda language: (counts[language], language), default="")
        return [
            {language if language == main or self.is_foreign(text, [main]) else main for text, language in mine}
            for mine in found
        ]


def load_language_identifier(language: str | None = None) -> LanguageIdentifier | None:
    """The identifier for `LANGUAGES` and another language; None if py3langid is not installed.

    Raises:
        ModuleNotFoundError: If a language is passed and py3langid is not installed.
        ValueError: If py3langid does not know the language.
    """
    try:
        from py3langid.langid import MODEL_FILE
        from py3langid.langid import LanguageIdentifier as Identifier
    except ModuleNotFoundError as error:
        if language is None:
            _report_missing()
            return None
        raise ModuleNotFoundError(
            f"The language {language!r} needs py3langid. Install it with: pip install 'hf-captionrl[language]'"
        ) from error
    return _loaded(Identifier, MODEL_FILE, language)


@cache
def _report_missing() -> None:
    logger.warning(
        "py3langid is not installed, so only the scripts of new and existing captions are compared, not their languages. Install "
        "it with: pip install 'hf-captionrl[language]'"
    )


@cache
def _loaded(kind: Any, file: Any, language: str | None) -> LanguageIdentifier:
    identifier = kind.from_model_file(file)
    if language is not None and language not in identifier.labels:
        raise ValueError(
            f"The language {language!r} is unknown. Use an ISO 639 code that py3langid knows, such as 'en'."
        )
    return LanguageIdentifier(identifier, LANGUAGES | {language} if language else LANGUAGES)


# --- Similarities of candidate captions with their image and the images that it may be confused with, in blocks ------
# Legend: M images, S candidates of all images, G most candidates of one image, k neighbours per image, B images of a block,
# D features.

_BLOCK_FLOATS = 2**23
"""Gathered features or scores per block: 32 MiB."""


class EncodedTexts:
    """Features of captions, computed when they are read, because those of millions of candidates do not fit into memory."""

    def __init__(self, scorer: Any, captions: Sequence[str]) -> None:
        self.scorer = scorer
        self.captions = captions

    def __getitem__(self, rows: Any) -> Tensor:
        return self.scorer.text_features([self.captions[row] for row in np.asarray(rows).tolist()])


@dataclass(frozen=True)
class CandidateScores:
    """Scores of every candidate, from which captions are chosen."""

    own: np.ndarray  # (S,): similarity to its image
    margin: np.ndarray  # (S,): that similarity minus the largest to another image; `own` if there is none
    rank: np.ndarray  # (S,): rank of its image among the images compared, 1 = best; ties count against it


def score_candidates(
    text_features: Any, starts: np.ndarray, images: Tensor, neighbours: Tensor | None = None, progress: Any = None
) -> CandidateScores:
    """Compare every candidate with its image and the image's neighbours, or with all images.

    Shapes: `starts` `(M + 1,)`, `images` `(M, D)`, `neighbours` `(M, k)`. With `neighbours=None` it is compared with
    all others.
    """
    total = int(starts[-1])
    own: np.ndarray = np.empty(total, np.float32)
    margin: np.ndarray = np.empty(total, np.float32)
    rank: np.ndarray = np.empty(total, np.int32)
    for rows, scores in _blocks(text_features, starts, images, neighbours, progress):
        mine = scores[:, 0]
        rank[rows] = ranks_from_scores(scores, torch.zeros(len(scores), dtype=torch.long)).numpy()
        own[rows] = mine.numpy()
        margin[rows] = (mine - scores[:, 1:].amax(1) if scores.shape[1] > 1 else mine).numpy()
    return CandidateScores(own, margin, rank)


def confusions_of(
    text_features: Any,
    chosen: Sequence[int],
    images: Tensor,
    neighbours: Tensor | None = None,
    *,
    starts: np.ndarray | None = None,
) -> list[tuple[tuple[int, ...], float]]:
    """For some captions, rows of the other images that each fits at least as well, best first, and its margin.

    `chosen` are rows of the text features; `starts` `(M + 1,)` is the first of them of each image, None one per image.
    """
    rows_of = np.asarray(chosen, dtype=np.int64)
    starts = np.arange(len(rows_of) + 1) if starts is None else starts
    owner = np.arange(len(images)).repeat(np.diff(starts))
    found: list[tuple[tuple[int, ...], float]] = []

    class Chosen:
        def __getitem__(self, rows: Any) -> Any:
            return text_features[rows_of[rows]]

    for rows, scores in _blocks(Chosen(), starts, images, neighbours, None):
        others = scores[:, 1:]
        margins = scores[:, 0] - others.amax(1) if others.shape[1] else scores[:, 0]
        better = torch.nonzero(others >= scores[:, :1])
        better = better[others[better[:, 0], better[:, 1]].argsort(descending=True, stable=True)]
        mine: list[list[int]] = [[] for _ in rows]
        for row, column in better.tolist():
            mine[row].append(column)
        for image, columns, margin in zip(owner[rows].tolist(), mine, margins.tolist(), strict=True):
            if neighbours is not None:
                columns = neighbours[image, columns].tolist()
            else:
                columns = [column + (column >= image) for column in columns]
            found.append((tuple(columns), margin))
    return found


def _blocks(
    text_features: Any, starts: np.ndarray, images: Tensor, neighbours: Tensor | None, progress: Any
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Rows of candidates and their scores `(rows, 1 + others)`: the target first, equal images tied."""
    number = len(images)
    same = duplicate_images(images)
    others = number - 1 if neighbours is None else neighbours.shape[1]
    most = int(np.diff(starts).max(initial=1))
    width = number * most if neighbours is None else (1 + others) * max(images.shape[1], most)
    size = max(1, _BLOCK_FLOATS // max(width, 1))
    for first in range(0, number, size):
        block = np.arange(first, min(first + size, number))
        rows = np.arange(starts[block[0]], starts[block[-1] + 1])
        counts = np.diff(starts[first : block[-1] + 2])
        text = torch.as_tensor(text_features[rows]).to(images)  # (rows, D)
        if neighbours is None:
            yield rows, _against_all(text, torch.from_numpy(block.repeat(counts)), images, same)
        else:
            yield rows, _against_neighbours(text, block, counts, images, neighbours, same)
        if progress is not None:
            progress(len(block))


def _against_all(text: Tensor, owners: Tensor, images: Tensor, same: Tensor) -> Tensor:
    scores = tie_copies(text @ images.T, same)  # (rows, M)
    # Move the target to the front; the others keep their order.
    own = scores.gather(1, owners[:, None])
    kept = torch.ones_like(scores, dtype=torch.bool).scatter_(1, owners[:, None], False)
    return torch.cat([own, scores[kept].view(len(scores), scores.shape[1] - 1)], 1).cpu()


def _against_neighbours(
    text: Tensor, block: np.ndarray, counts: np.ndarray, images: Tensor, neighbours: Tensor, same: Tensor
) -> Tensor:
    own = torch.from_numpy(block)
    columns = torch.cat([own[:, None], neighbours[own]], 1)  # (B, 1 + k)
    place = np.arange(counts.max()) < counts[:, None]  # (B, G)
    padded = text.new_zeros(*place.shape, text.shape[1])
    padded[torch.from_numpy(place)] = text
    scores = torch.bmm(padded, images[columns].transpose(1, 2)).cpu()  # (B, G, 1 + k)
    equal = same[columns] == same[columns[:, :1]]  # (B, 1 + k)
    if int(equal.sum()) > len(block):
        scores = torch.where(equal[:, None], scores[:, :, :1], scores)
    return scores[torch.from_numpy(place)]


# --- Pragmatic decoding: captions that a listener would not take for one of the similar images -----------------------
# Reference: Cohn-Gordon, Goodman and Potts 2018, "Pragmatically Informative Image Captioning with Character-Level Inference",
# with words instead of characters.
#
# Legend: B images, K images of a group (the target first, then its distractors), N rows = B * K * beams, V vocabulary, T tokens.


class PragmaticProcessor(LogitsProcessor):
    r"""Makes every step of generation prefer words that the other images of a group make less likely.

    The literal speaker is the captioner, `S0(w | image, prefix)`. The incremental listener knows the group,
    `L(image | prefix, w) ∝ L(image | prefix) S0(w | image, prefix)`, starting from the uniform distribution. The score of
    a word is `log S0(w | target, prefix) + rationality * log L(target | prefix, w)`.

    All rows of a group get the scores of its target, so that they continue the same text; with beams, each row of the
    group therefore has the same beams.

    `rationality` is the listener's weight, >= 0; 0 is the captioner alone.
    """

    def __init__(self, group_size: int, num_beams: int = 1, rationality: float = 1.0) -> None:
        if group_size < 1 or rationality < 0:
            raise ValueError(
                f"group_size is {group_size} and rationality {rationality}. Use at least 1 image, and a rationality of 0 or "
                "more."
            )
        self.group_size = group_size
        self.num_beams = num_beams
        self.rationality = rationality
        self._before: tuple[Tensor, Tensor] | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # type: ignore[override]
        """Logits or log-probabilities of a step, `(N, V)`, replaced by those of the pragmatic speaker."""
        shape = (len(scores) // (self.group_size * self.num_beams), self.group_size, self.num_beams)
        speaker = scores.float().log_softmax(-1).view(*shape, scores.shape[-1])  # (B, K, beams, V)
        prefix = input_ids.view(*shape, input_ids.shape[-1])[:, 0]  # (B, beams, T)
        joint = self._prior(prefix, speaker)[..., None] + speaker
        # A floor, because a word that no image of the group allows has no listener.
        listener = joint - joint.logsumexp(1, keepdim=True).clamp(min=-1e30)  # (B, K, beams, V)
        target = (speaker[:, 0] + self.rationality * listener[:, 0]).log_softmax(-1)
        self._before = (prefix, listener)
        return target[:, None].expand_as(speaker).reshape(scores.shape).to(scores.dtype)

    def _prior(self, prefix: Tensor, speaker: Tensor) -> Tensor:
        """`log L(image | prefix)`, `(B, K, beams)`: the listener's after the last word of each prefix."""
        uniform = speaker.new_full(speaker.shape[:3], -math.log(self.group_size))
        if self._before is None:
            return uniform
        before, listener = self._before
        if before.shape[-1] + 1 != prefix.shape[-1] or len(before) != len(prefix):
            raise ValueError("The processor has been used before. Use a new PragmaticProcessor for each generation.")
        # Beams are sorted anew at every step: find the one that each continues.
        same = (prefix[:, :, None, :-1] == before[:, None]).all(-1)  # (B, beams, beams before)
        parent = same.int().argmax(-1)  # (B, beams)
        batch = torch.arange(len(prefix), device=prefix.device)[:, None]
        return listener[batch, :, parent, prefix[:, :, -1]].transpose(1, 2)


def pragmatic_captions(
    captioner: Captioner,
    images: Sequence[Image.Image],
    groups: Sequence[Sequence[int]],
    *,
    rationality: float = 1.0,
    num_beams: int = 4,
    num_return_sequences: int = 1,
    **settings: Any,
) -> list[list[str]]:
    """Captions that distinguish the first image of each group from the others.

    A group holds rows of the images, the target first; all groups have the same size. Returns the best caption first.
    """
    size = len(groups[0])
    if any(len(group) != size for group in groups):
        raise ValueError(f"The groups have {sorted({len(g) for g in groups})} images. Use groups of equal size.")
    rows = torch.tensor([row for group in groups for row in group])
    with evaluating(captioner.model), torch.no_grad():
        inputs = {name: value.to(captioner.device) for name, value in captioner.encode_images(list(images)).items()}
        inputs["image_features"] = captioner.encode(captioner.base_model, dict(inputs))
        del inputs["pixel_values"]
        processor = PragmaticProcessor(size, num_beams, rationality)
        found = captioner.generate(
            **{name: value[rows.to(value.device)] for name, value in inputs.items()},
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_return_sequences,
            logits_processor=LogitsProcessorList([processor]),
            **settings,
        ).captions
    each = size * num_return_sequences
    return [found[start : start + num_return_sequences] for start in range(0, len(found), each)]


# --- Candidate captions of each image: beams, samples, pragmatic beams, answers to a contrastive prompt --------------
# Legend: B images of a batch, G candidates per image.


def generate_candidates(
    captioner: Captioner,
    images: Sequence[Any],
    image_ids: Sequence[str],
    options: CandidateOptions,
    *,
    rows: Sequence[int] | None = None,
    similar: Sequence[Sequence[int]] | None = None,
    progress: Callable[[int], Any] | None = None,
) -> list[list[str]]:
    """Candidates of images, without repeated texts. The caller's random state does not change.

    The seed of a batch depends on its first image, so the samples do not depend on earlier batches.

    `similar` are the rows of the images most similar to each of `rows`, for pragmatic decoding.
    """
    check_candidate_options(options, captioner)
    rows = range(len(images)) if rows is None else rows
    found: list[list[str]] = []
    device = captioner.device
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        evaluating(captioner.model),
    ):
        for start in range(0, len(rows), options.batch_size):
            part = slice(start, start + options.batch_size)
            batch = rows[part]
            torch.manual_seed(seed_of_batch(options.seed, image_ids[batch[0]]))
            others = None if similar is None else dict(zip(batch, similar[part], strict=True))
            found += [list(dict.fromkeys(texts)) for texts in _of_batch(captioner, images, batch, options, others)]
            if progress is not None:
                progress(len(batch))
    return found


def contrastive_answers(
    captioner: Captioner,
    images: Sequence[Any],
    rows: Sequence[int],
    said: Sequence[Sequence[str]],
    options: CandidateOptions,
    *,
    progress: Callable[[int], Any] | None = None,
) -> list[list[str]]:
    """Beams of a chat model that is told the captions of the similar images."""
    prompts = {row: contrastive_prompt(captioner.prompt, others) for row, others in zip(rows, said, strict=True)}
    found: list[list[str]] = []
    with evaluating(captioner.model):
        for start in range(0, len(rows), options.batch_size):
            for chunk, opened in opened_chunks(images, rows[start : start + options.batch_size], options.batch_size):
                inputs = encode_with_prompts(captioner, opened, [prompts[row] for row in chunk])
                found += _grouped(captioner.generate(**inputs, **_beams(options)).captions, len(chunk))
                if progress is not None:
                    progress(len(chunk))
    return found


def _grouped(texts: Sequence[str], number: int) -> list[list[str]]:
    each = len(texts) // number
    return [list(texts[start : start + each]) for start in range(0, len(texts), each)]


def _beams(options: CandidateOptions) -> dict[str, Any]:
    # All settings are explicit, so that the checkpoint's defaults have no effect.
    number = {"num_beams": options.num_beams, "num_return_sequences": options.num_beams}
    return {"do_sample": False, "max_new_tokens": options.max_new_tokens, **number}


def _of_batch(
    captioner: Captioner,
    images: Sequence[Any],
    rows: Sequence[int],
    options: CandidateOptions,
    similar: Mapping[int, Sequence[int]] | None,
) -> list[list[str]]:
    found: list[list[str]] = []
    sampling: dict[str, Any] = {
        "do_sample": True,
        "num_beams": 1,
        "temperature": options.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "num_return_sequences": options.num_samples,
        "max_new_tokens": options.max_new_tokens,
    }
    for chunk, opened in opened_chunks(images, rows, options.batch_size):
        inputs = captioner.encode_images(opened)
        if options.decoding == "rsa" and similar is not None:
            mine = _pragmatic(captioner, images, chunk, opened, options, similar)
        else:
            mine = _grouped(captioner.generate(**inputs, **_beams(options)).captions, len(chunk))
        if options.num_samples:
            samples = _grouped(captioner.generate(**inputs, **sampling).captions, len(chunk))
            mine = [beams + more for beams, more in zip(mine, samples, strict=True)]
        found += mine
    return found


def _pragmatic(
    captioner: Captioner,
    images: Sequence[Any],
    rows: Sequence[int],
    opened: Sequence[Image.Image],
    options: CandidateOptions,
    similar: Mapping[int, Sequence[int]],
) -> list[list[str]]:
    """Pragmatic beams, image by image, because each has other distractors."""
    found = []
    for row, image in zip(rows, opened, strict=True):
        others = [i for i in similar[row] if i != row][: options.num_distractors]
        group = [image]
        for _, more in opened_chunks(images, others, len(others) or 1):
            group += more
        found += pragmatic_captions(
            captioner,
            group,
            [list(range(len(group)))],
            rationality=options.rationality,
            num_beams=options.num_beams,
            num_return_sequences=options.num_beams,
            max_new_tokens=options.max_new_tokens,
        )
    return found


# --- Finetunes a captioner on an album by self-retrieval, and keeps the result only if a held-out scorer prefers it ---

MOST_MEASURED = 500
"""Largest number of images whose captions are used for the decision."""
_BAG = 5
_SAVE_SECONDS = 60  # between checkpoints
_MAX_DEGENERATE = 0.1
_NEIGHBOURS = 20


@dataclass(frozen=True)
class Adapted:
    """The captioner to use."""

    captioner: Captioner  # with the adapter if it was kept, else as it was loaded
    facts: dict[str, Any]  # whether it was kept and why, steps, R@1 before and after by both scorers, and a sentence


class _Clock(TrainerCallback, ExportableState):
    """Ends the training when its time is over, saves checkpoints, and shows a bar; a resumed training has the time that is left."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.interval = seconds, min(_SAVE_SECONDS, seconds / 5)
        self.used = 0.0
        self._images = 0
        self._before = self._start = self._saved = 0.0
        self._bar: Any = None

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"used": self.used}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        from tqdm import tqdm

        kept: Any = state.stateful_callbacks.get(type(self).__name__, {}) if state.global_step else {}
        self._before = self.used = float(kept.get("attributes", {}).get("used", 0.0))
        self._start = self._saved = time.monotonic()
        shape = "{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s{postfix}"
        self._bar = tqdm(total=self.seconds, desc="adapting", bar_format=shape, disable=None)
        self._show(0.0, state)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = time.monotonic()
        self.used = self._before + now - self._start
        self._images += args.train_batch_size
        self._show(self._images / max(now - self._start, 1e-9), state)
        if control.should_training_stop:  # the guard stopped, and may have loaded earlier weights
            return
        control.should_training_stop = self.used >= self.seconds
        # Also at the end: the command may be killed while the captions are measured.
        if control.should_training_stop or now - self._saved >= self.interval:
            control.should_save, self._saved = True, now

    def _show(self, rate: float, state: TrainerState) -> None:
        self._bar.set_postfix_str(f"{state.global_step} steps, {rate:.1f} images/s", refresh=False)
        self._bar.update(min(self.used, self.seconds) - self._bar.n)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._bar.close()


def adapt_to_album(
    load: Callable[[], Captioner],
    scorer: Scorer,
    held_out: Scorer,
    images: Sequence[Any],
    folder: str | os.PathLike[str],
    *,
    seconds: float,
    cache_dir: str | None = None,
    learning_rate: float = 1e-4,
    batch_size: int = 20,
    seed: int = 0,
    max_steps: int = 1_000_000,
    resume: bool = False,
) -> Adapted:
    """Train a LoRA on the images of the album for a given time; this needs no captions.

    The reward is self-retrieval among look-alikes: bags of 5, which the reward scorer builds, or random images in small albums.
    The guard stops the training if captions degenerate, and returns to the last checkpoint before that. The adapter is used if
    there is such a checkpoint and, with one caption per image from beam search, the held-out scorer ranks more images first than
    before. It is saved in either case.

    `held_out` decides and should not be the scorer; `load` is called again if the adapter is not kept. With `resume`, a training that was
    killed resumes from its last checkpoint in `folder` for the remaining time.
    """
    caches = [FeatureCache.for_scorer(one, cache_dir) for one in (scorer, held_out)]
    facts = read_images(images, scorer, cache=caches[0], skip_unreadable=True)
    first = list({key: at for at, key in reversed(list(enumerate(facts.keys)))}.values())
    first.sort()  # an image must not be its own distractor
    rows = [facts.rows[at] for at in first]
    if len(rows) < 2:
        raise ValueError(
            f"The album has {len(rows)} different images, and self-retrieval needs at least 2. Leave --adapt out."
        )
    chosen = ChosenImages(images, rows)
    features = facts.features[torch.tensor(first)]
    held_out_features = read_images(chosen, held_out, cache=caches[1]).features
    captioner = load()
    scorers = {"scorer": (scorer, features), "held_out": (held_out, held_out_features)}
    said = _captions(captioner, chosen)
    before = _measure(said, scorers)
    trainer, bags = _trainer(
        captioner, scorer, held_out, chosen, list(said.values()), features, Path(folder), learning_rate, batch_size
    )
    trainer.args.seed, trainer.args.max_steps = seed, max_steps
    trainer.add_callback(_Clock(seconds))
    with contextlib.redirect_stdout(
        sys.stderr
    ):  # the numbers that the Trainer prints are not the result of the command
        trainer.train(resume_from_checkpoint=resume and has_checkpoint(folder))
    after = _measure(_captions(captioner, chosen), scorers)
    captioner.save_pretrained(Path(folder))
    reason = _reason_against(trainer, before, after)
    rolled_back_to = None if trainer.guard is None else trainer.guard.rolled_back_to
    found = {
        "kept": reason is None,
        "reason": reason,
        "steps": trainer.state.global_step,
        "rolled_back_to": None if rolled_back_to is None else Path(rolled_back_to).name,
        "seconds": seconds,
        "bags_of": bags,
        "before": before,
        "after": after,
        "adapter": str(folder),
    }
    found["sentence"] = (
        f"Adapted in {found['steps']} steps: R@1 of the held-out scorer {before['held_out']:.3f} before, {after['held_out']:.3f} "
        f"after, of the reward scorer {before['scorer']:.3f} and {after['scorer']:.3f}. "
        + (f"The guard returned to {found['rolled_back_to']}. " if rolled_back_to else "")
        + ("The adapter is used." if reason is None else f"The adapter is not used: {reason}")
    )
    return Adapted(captioner if reason is None else load(), found)


def _trainer(
    captioner: Captioner,
    scorer: Scorer,
    held_out: Scorer,
    images: Sequence[Any],
    said: Sequence[str],
    features: Tensor,
    folder: Path,
    learning_rate: float,
    batch_size: int,
) -> tuple[SelfRetrievalTrainer, int | None]:
    number = len(images)
    uses_bags = number >= 4 * batch_size and batch_size % _BAG == 0
    args = SelfRetrievalConfig(
        str(folder),
        max_steps=1,
        learning_rate=learning_rate,
        per_device_train_batch_size=min(batch_size, number),
        do_sample=True,
        bag_schedule=str(_BAG) if uses_bags else None,
        max_completion_length=min(40, *(one.max_text_tokens - 2 for one in (scorer, held_out))),
        guard="rollback",
        save_strategy="no",  # the clock saves
        save_total_limit=3,  # the newest may have been saved when the captions had begun to degenerate
        eval_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
        freeze_vision_tower=True,
    )
    column = datasets.Image(decode=False)
    encoded = [image if isinstance(image, dict) else column.encode_example(image) for image in _plain(images)]
    # Captions of the captioner before training. No reward uses them, but the guard compares lengths with them.
    captions = [[said[row % len(said)] or "-"] for row in range(number)]
    table = {"image": encoded, "image_id": [str(row) for row in range(number)], "captions": captions}
    types = {
        "image": datasets.Image(),
        "image_id": datasets.Value("string"),
        "captions": datasets.List(datasets.Value("string")),
    }
    neighbours = nearest_neighbours(features, min(_NEIGHBOURS, number - 1))[0] if uses_bags else None
    trainer = SelfRetrievalTrainer(
        captioner,
        scorer,
        args,
        train_dataset=datasets.Dataset.from_dict(table, datasets.Features(types)),
        held_out_scorer=held_out,
        neighbours=neighbours,
        peft_config=captioner.lora_config(),
    )
    return trainer, _BAG if uses_bags else None


def _plain(images: Sequence[Any]) -> list[Any]:
    return [os.fspath(image) if isinstance(image, os.PathLike) else image for image in images]


def _captions(captioner: Captioner, images: Sequence[Any]) -> dict[int, str]:
    """One caption from beam search for each of some images, by row."""
    step = max(1, len(images) // MOST_MEASURED)
    rows = list(range(0, len(images), step))[:MOST_MEASURED]
    captions = generate_captions(captioner, ChosenImages(images, rows), do_sample=False, num_beams=3)
    return dict(zip(rows, captions, strict=True))


def _measure(captions: dict[int, str], scorers: dict[str, tuple[Scorer, Tensor]]) -> dict[str, float]:
    """R@1 of captions among the album by each scorer, and the share of degenerate captions."""
    texts = list(captions.values())
    found = {"degenerate": sum(degenerate(texts)) / len(texts)}
    for name, (scorer, features) in scorers.items():
        text = scorer.text_features(spoken(texts)).float().cpu()
        found[name] = float((ranks(text, features, list(captions)) == 1).double().mean())
    return found


def _reason_against(trainer: SelfRetrievalTrainer, before: dict[str, float], after: dict[str, float]) -> str | None:
    """Why the adapter is not used; None if it is."""
    if trainer.guard is not None and trainer.guard.trips and trainer.guard.rolled_back_to is None:
        return f"the guard stopped the training: {trainer.guard.trips[0]['reason']}"
    if after["degenerate"] > max(_MAX_DEGENERATE, before["degenerate"]):
        return f"{after['degenerate']:.0%} of its captions are degenerate."
    if after["held_out"] <= before["held_out"]:
        return "the held-out scorer does not rank more images first."
    return None
