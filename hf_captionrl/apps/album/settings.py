"""Options of an album: how candidates are generated, constraints on captions, how captions are chosen.

Imports nothing heavy, because the help of the command reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hf_captionrl.utils.options import not_negative, option, positive

# --- Parses durations such as 10m ------------------------------------------------------------------------------------

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Convert a duration such as `90s`, `10m` or `1.5h` to seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip().lower())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a duration. Use a number above 0 and s, m or h, such as 10m.")
    return float(match[1]) * _SECONDS[match[2]]


# --- Options of an album: how candidates are generated, constraints on captions, how captions are chosen -------------

SMALL_ALBUM = 2000
"""Largest album in which a caption is compared with every other image by default."""
NEIGHBOURS = 64
"""Images that a caption is compared with in larger albums."""


@dataclass
class CandidateOptions:
    """How candidate captions are generated."""

    heading: ClassVar[str] = "candidates"

    num_beams: int = option(16, parse=positive, metavar="N", help="candidates per image by beam search")
    num_samples: int = option(0, parse=not_negative, metavar="N", help="candidates per image by sampling")
    temperature: float = option(0.7, metavar="X", help="temperature of sampling")
    max_new_tokens: int = option(40, parse=positive, metavar="N", help="longest caption in tokens")
    seed: int = option(0, metavar="N", help="seed of sampling")
    batch_size: int = option(16, parse=positive, metavar="N", help="images captioned at once")
    decoding: Literal["beam", "rsa"] = option(
        "beam", help="how beams are searched: by the captioner alone, or with a listener that knows the similar images"
    )
    rationality: float = option(1.0, metavar="X", help="weight of the listener of --decoding rsa")
    num_distractors: int = option(
        3, parse=positive, metavar="N", help="similar images that the listener or the contrastive prompt knows"
    )
    contrastive: bool = option(
        False, help="ask a chat model what is different from the captions of the similar images, and add its answers"
    )


@dataclass
class ConstraintOptions:
    """Constraints on captions. If no candidate of an image meets them, the image gets the best one."""

    heading: ClassVar[str] = "constraints"

    max_characters: int | None = option(
        None, parse=positive, metavar="N", help="longest caption; longer ones are shortened; 125 for alternative texts"
    )
    require: list[str] = option([], repeated=True, metavar="WORD", help="word that every caption must contain")
    forbid: list[str] = option([], repeated=True, metavar="WORD", help="word that no caption may contain")
    language: str = option(
        "auto",
        metavar="CODE",
        help="language of the captions: auto (that of the existing captions of an image; without py3langid, their script), any, "
        "or a code such as en (needs py3langid)",
    )


@dataclass
class AlbumSettings(ConstraintOptions, CandidateOptions):
    """How the captions of an album are chosen."""

    heading: ClassVar[str] = "choice"

    choice: Literal["assignment", "margin", "first"] = option(
        "assignment",
        help="how a candidate is chosen: all images together, the largest margin of each image, or the first candidate",
    )
    neighbours: int | None = option(
        None,
        parse=positive,
        metavar="N",
        help=f"similar images that a caption is compared with (default: all in albums of up to {SMALL_ALBUM:,}, else "
        f"{NEIGHBOURS})",
    )
    max_component: int = option(2000, parse=positive, metavar="N", help="most images that are assigned texts at once")
    copy_threshold: float | None = option(
        None,
        metavar="X",
        help="cosine from which two images may be copies (default: calibrated on the album; above 1: only equal pixels)",
    )
    drop_shared: bool = option(False, help="remove phrases that all captions of a group share")
    trigger: str | None = option(
        None, metavar="TEXT", help="text that replaces the first shared phrase, or precedes the caption"
    )
    shared_share: float = option(0.9, metavar="X", help="share of a group's captions that contain a shared phrase")


def check_candidate_options(options: CandidateOptions, captioner: Any | None = None) -> None:
    """Refuse options that no captioner, or not this captioner, supports."""
    if options.num_beams < 1 or options.num_samples < 0:
        raise ValueError(
            f"num_beams is {options.num_beams} and num_samples is {options.num_samples}. Use at least 1 beam and 0 samples."
        )
    if options.temperature <= 0:
        raise ValueError(f"temperature is {options.temperature}. Use a number above 0, or num_samples=0 for none.")
    if options.rationality < 0:
        raise ValueError(f"rationality is {options.rationality}. Use 0 (the captioner alone) or more.")
    if options.contrastive and captioner is not None and captioner.family != "chat":
        raise ValueError(
            f"A contrastive prompt needs a chat model, but this captioner is of the family {captioner.family!r}. Use "
            "decoding='rsa', which every family supports."
        )
