"""What surrounds the captioner: metrics that are also rewards, and the loading of images."""

from __future__ import annotations

import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from hf_captionrl.captioners.captioner import Captioner
from hf_captionrl.data import cached_pixels, open_image
from hf_captionrl.data.columns import undecoded
from hf_captionrl.metrics import self_retrieval
from hf_captionrl.retrieval.ranking import ranks
from hf_captionrl.text.bleu import pairwise_bleu
from hf_captionrl.text.cider_d import CiderScorer, DocumentFrequencies
from hf_captionrl.text.ngrams import encode_words
from scripts.benchmarks.timing import Case
from tests.data.photos import photographs

# --- metrics --------------------------------------------------------------------------------------------------------

_NOUNS = "dog cat man woman bus train pizza table bench horse boat child clock bird".split()
_PLACES = "street field kitchen beach room park station river forest market".split()
_ADJECTIVES = "red small young old wooden large white brown blue busy bright tall".split()
_VERBS = "sitting standing riding holding walking looking running eating playing".split()
_RARE = [f"rareword{i}" for i in range(6000)]

METRICS = {"paper": (5000, 100, (5000, 30_000, 512)), "tiny": (120, 100, (20, 30, 8))}
"""Images of the document frequencies, images with 5 captions, and captions, images and features of the ranking."""


def _caption(rng: random.Random, topic: tuple[str, str, str]) -> list[str]:
    """A caption of about COCO's length (10.5 words) and vocabulary about one topic."""
    noun, verb, place = topic
    words = ["a", rng.choice(_ADJECTIVES), noun, verb, *rng.choice([["in"], ["on"], ["next", "to"], ["near"]])]
    words += [rng.choice(["a", "the"]), *([rng.choice(_ADJECTIVES)] if rng.random() < 0.5 else []), place]
    if rng.random() < 0.6:
        words += ["with", "a", rng.choice(_NOUNS), *(["and", "a", rng.choice(_NOUNS)] if rng.random() < 0.5 else [])]
    if rng.random() < 0.5:
        words.insert(rng.randrange(len(words)), rng.choice(_RARE))
    return words


def corpus(rng: random.Random, images: int, captions: int = 5) -> list[list[list[str]]]:
    """Captions of images, as words."""
    topics = [(rng.choice(_NOUNS), rng.choice(_VERBS), rng.choice(_PLACES)) for _ in range(images)]
    return [[_caption(rng, topic) for _ in range(captions)] for topic in topics]


def _ngrams(words: list[str]) -> list[Counter]:
    return [Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1)) for n in range(1, 5)]


def _sentence_bleu(words: list[str], reference: list[str]) -> list[float]:
    """BLEU-1 ... 4 of one caption against one other, as pycocoevalcap computes it."""
    mine, other = _ngrams(words), _ngrams(reference)
    product, scores = 1.0, []
    ratio = (len(words) + 1e-15) / (len(reference) + 1e-9)
    penalty = math.exp(1 - 1 / ratio) if ratio < 1 else 1.0
    for n in range(1, 5):
        matches = sum(min(count, other[n - 1][ngram]) for ngram, count in mine[n - 1].items())
        product *= (matches + 1e-15) / (max(0, len(words) - n + 1) + 1e-9)
        scores.append(product ** (1 / n) * penalty)
    return scores


def plain_pairwise_bleu(groups: list[list[list[str]]]) -> np.ndarray:
    """BLEU of every caption against every other one of its image: the loop anyone writes."""
    found = [_sentence_bleu(a, b) for group in groups for a in group for b in group]
    return np.array(found).reshape(len(groups), len(groups[0]), len(groups[0]), 4)


def metrics_case(name: str, device: str, dtype: torch.dtype, seed: int) -> Case:
    """CIDEr-D beside pycocoevalcap, BLEU between the captions of an image beside a plain loop, and self-retrieval beside the bare
    matrix product: the ranks alone, and the whole metric with its checks and intervals."""
    from pycocoevalcap.cider.cider import Cider

    training_images, images, pool_sizes = METRICS[name]
    rng = random.Random(seed)
    training = corpus(rng, training_images)
    references = rng.sample(training, images)
    candidates = [[list(rng.choice(group)) for _ in range(5)] for group in references]
    for words in (words for group in candidates for words in group):
        words[rng.randrange(len(words))] = rng.choice(_NOUNS + _ADJECTIVES + _RARE[:100])
    truth = {5 * i + j: [" ".join(words) for words in group] for i, group in enumerate(references) for j in range(5)}
    written = {5 * i + j: [" ".join(words)] for i, group in enumerate(candidates) for j, words in enumerate(group)}
    # Equal numbers first: pycocoevalcap takes each candidate for an image, so its documents repeat.
    same = CiderScorer(DocumentFrequencies.from_references([group for group in references for _ in range(5)]))
    cider = np.abs(same(candidates, references).numpy() - Cider().compute_score(truth, written)[1]).max()
    flat = [words for group in candidates for words in group]
    bleu = np.abs(pairwise_bleu(encode_words(flat), 5).numpy() - plain_pairwise_bleu(candidates)).max()
    if not max(cider, bleu) < 1e-6:
        raise RuntimeError(f"CIDEr-D differs by {cider:.1e}, BLEU by {bleu:.1e}: a time would say nothing.")
    scorer = CiderScorer(DocumentFrequencies.from_references(training))
    generator = torch.Generator().manual_seed(seed)
    captions, among, width = pool_sizes
    text, pool = (
        torch.nn.functional.normalize(torch.randn(n, width, generator=generator), dim=1).to(device)
        for n in (captions, among)
    )
    targets = torch.arange(captions, device=device) % among
    works: dict[str, Callable[[], Any]] = {
        "CIDEr-D": lambda: scorer(candidates, references),
        "CIDEr-D, pycocoevalcap": lambda: Cider().compute_score(truth, written),
        "BLEU": lambda: pairwise_bleu(encode_words(flat), 5),
        "BLEU, plain loop": lambda: plain_pairwise_bleu(candidates),
        "ranks": lambda: ranks(text, pool, targets),
        "self-retrieval": lambda: self_retrieval(text, pool, targets=targets),
        "matrix product": lambda: text @ pool.T,
    }
    bars = [("CIDEr-D, pycocoevalcap", "CIDEr-D", 25.0), ("BLEU, plain loop", "BLEU", 15.0)]
    # The other way round: at most 1.3 times the product.
    bars += [("matrix product", "ranks", 1 / 1.3), ("matrix product", "self-retrieval", 1 / 1.3)]
    size = f"{images} images x 5 captions; {captions} captions in a pool of {among} images, {width} features"
    return Case(size, works, bars, notes={"differences": {"CIDEr-D": float(cider), "BLEU": float(bleu)}})


# --- images ---------------------------------------------------------------------------------------------------------

SIDES = {"224": (16, 224), "384": (16, 384), "tiny": (2, 8)}
"""Images of a batch, and the input size of the vision tower."""


class ImageInputs(Captioner):
    """The part of a captioner that reads images."""

    max_text_tokens = 0

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor


def loader_case(name: str, device: str, dtype: torch.dtype, seed: int) -> Case:
    """From JPEG files of 640 x 480 pixels to the `pixel_values` of a batch on the device: decoding and preparing, or the pixel cache."""
    number, side = SIDES[name]
    folder = tempfile.TemporaryDirectory()
    dataset = photographs(Path(folder.name) / "images", number)
    files = undecoded(dataset)["image"][:]
    size = {"size": {"height": side, "width": side}}
    plain = ImageInputs(transformers.BlipImageProcessorPil(**size))
    ours = ImageInputs(transformers.BlipImageProcessor(**size))
    cache: dict[str, Any] = {"directory": Path(folder.name) / "cache", "progress": False}
    stored: dict[str, Any] = {"cache_pixels=uint8": cached_pixels(dataset, ours.prepared_pixels, **cache)}

    def opened(captioner: ImageInputs) -> Tensor:
        return captioner.encode_images([open_image(file) for file in files])["pixel_values"].to(device, dtype)

    def read(pixels: Any) -> Tensor:
        return ours.encode_pixels([pixels.tensor(i) for i in range(number)])["pixel_values"].to(device, dtype)

    if not torch.equal(read(stored["cache_pixels=uint8"]), opened(ours)):
        raise RuntimeError("The pixels of cache_pixels=uint8 are not those of the image processor.")
    works: dict[str, Callable[[], Any]] = {
        "Pillow's decoder and processor": lambda: opened(plain),
        "Pillow's decoder, torchvision's processor": lambda: opened(ours),
        # The folder lives as long as the work that reads it.
        **{key: lambda pixels=pixels, _=folder: read(pixels) for key, pixels in stored.items()},  # type: ignore[misc]
    }
    first, *others = works
    bars = {"cache_pixels=uint8": 15.0}
    return Case(f"{number} JPEGs, {side} pixels", works, [(first, other, bars.get(other)) for other in others])
