"""Captions with the numbers that several tables need."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_captionrl.metrics.perplexity import caption_losses
from hf_captionrl.metrics.suites import spoken
from hf_captionrl.retrieval import TokenScorer
from hf_captionrl.retrieval.ranking import duplicate_images, ranks, unit_rows
from hf_captionrl.utils.parts import Stage

if TYPE_CHECKING:
    import pyarrow as pa

    from hf_captionrl.evaluation.evaluator import Evaluator, ScoredCaptions
    from hf_captionrl.retrieval import Scorer


# --- Scores of captions by a scorer and a language model, in blocks: in this process, or as a stage on shards --------
# Because of rounding, features and losses depend on the batch, and batches depend on all captions of a call. Both ways therefore
# process the same blocks of captions, and their numbers are bit-identical.
#
# Legend: N captions of a source, one per image; B of them in a block; M images of a pool, D features.

BLOCK = 256
"""Captions that are encoded together."""

_IN_MEMORY = 2**28
"""Bytes of a column from which it is in a file."""

_CAPTIONS = "captions.parquet"
_POOLS = {"image_rank": "images.npy", "pool_rank": "pool.npy"}


class CaptionScoring:
    """Computes columns of numbers for a block of captions. Columns whose model is not given are missing.

    Args:
        scorer: Computes `text` `(B, D)`; with `clip_prefix` also `clip_text`, the captions after the prefix; and `tokens` if it
            counts tokens.
        language_model: `(model, tokenizer)`; computes `nats` and `scored_tokens`, the losses of the captions.
        clip_prefix: Text before each caption.
        pools: Features `(M, D)` by the name of a column, which contains the rank of each caption's image among them; image i of
            a pool belongs to caption i.
    """

    def __init__(
        self,
        scorer: Scorer | None,
        language_model: tuple[Any, Any] | None = None,
        *,
        clip_prefix: str = "",
        pools: Mapping[str, Any] | None = None,
    ) -> None:
        self.scorer, self.language_model, self.clip_prefix = scorer, language_model, clip_prefix
        self._pools = {}
        for name, features in (pools or {}).items():
            unit = unit_rows(torch.as_tensor(features).to(getattr(scorer, "device", "cpu")))
            self._pools[name] = (unit, duplicate_images(unit))

    def __call__(self, captions: Sequence[str], first: int) -> dict[str, np.ndarray]:
        """Columns of a block; `first` is the image of its first caption."""
        texts, found = spoken(captions), {}
        if self.scorer is not None:
            text = self.scorer.text_features(texts)
            found["text"] = text.float().cpu().numpy()
            if self.clip_prefix:
                prefixed = self.scorer.text_features([self.clip_prefix + caption for caption in texts])
                found["clip_text"] = prefixed.float().cpu().numpy()
            # Other implementations of a scorer need not count tokens.
            if isinstance(self.scorer, TokenScorer):
                found["tokens"] = np.asarray(self.scorer.count_tokens(texts), dtype=np.int64)
            targets = torch.arange(first, first + len(texts))
            for name, (images, first_row) in self._pools.items():
                rows = unit_rows(text.float().to(images.device))
                found[name] = ranks(rows, images, targets, duplicate_of=first_row).numpy()
        if self.language_model is not None:
            losses = caption_losses(texts, *self.language_model)
            found |= {"nats": losses.nats.numpy(), "scored_tokens": losses.tokens.numpy()}
        return found


def score_captions_in_blocks(
    scoring: CaptionScoring, captions: Sequence[str], first: int = 0, *, folder: Path | None = None
) -> dict[str, np.ndarray]:
    """Columns of captions whose images are `first`, `first + 1`, ...; `first` is a multiple of `BLOCK`.

    `folder` is for [`empty_column`].
    """
    found: dict[str, np.ndarray] = {}
    for at in range(0, len(captions), BLOCK):
        for name, values in scoring(captions[at : at + BLOCK], first + at).items():
            if at == 0:
                found[name] = empty_column((len(captions), *values.shape[1:]), values.dtype, folder)
            found[name][at : at + len(values)] = values
    return found


def empty_column(shape: tuple[int, ...], dtype: Any, folder: Path | None) -> np.ndarray:
    """An array to be filled; a large one in a temporary file of `folder`, so that the system can release its pages."""
    if folder is None or np.prod(shape, dtype=np.int64) * np.dtype(dtype).itemsize < _IN_MEMORY:
        return np.empty(shape, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, dtype, "w+", shape=shape)


def write_inputs(folder: Path, captions: Sequence[Sequence[str]], pools: Mapping[str, Any]) -> None:
    """Write what the processes of [`ScoreStage`] read: the captions of each source, and the features of the images."""
    import io

    import pyarrow as pa
    import pyarrow.parquet

    from hf_captionrl.utils.io import atomic_write_bytes

    for name, features in pools.items():
        buffer = io.BytesIO()
        np.save(buffer, torch.as_tensor(features).cpu().numpy())
        atomic_write_bytes(folder / _POOLS[name], buffer.getvalue())
    buffer = io.BytesIO()
    columns = {str(source): list(texts) for source, texts in enumerate(captions)}
    pyarrow.parquet.write_table(pa.table(columns), buffer)
    atomic_write_bytes(folder / _CAPTIONS, buffer.getvalue())


class ScoreStage(Stage):
    """Columns of [`CaptionScoring`] for the captions of several sources, one source after the other.

    Each source begins with a new shard: row `s * rows_per_source + i` of the stage is caption i of source s, and rows after
    the last caption of a source have no result.

    `rows_per_source` is a multiple of the rows per shard, at least the number of captions.
    """

    def __init__(
        self,
        folder: Path,
        rows_per_source: int,
        models: Sequence[str | None],
        clip_prefix: str,
        columns: Sequence[str],
    ) -> None:
        self.folder, self.rows_per_source = folder.absolute(), rows_per_source
        self.models, self.clip_prefix, self._columns = tuple(models), clip_prefix, tuple(columns)

    def load(self) -> None:
        import pyarrow.parquet

        from hf_captionrl.evaluation.options import load_evaluators

        dataset, scorer_name, language_model_name = self.models
        scorer, language_model, _ = load_evaluators(str(dataset), scorer_name, language_model_name)
        pools = {name: np.load(self.folder / file) for name, file in _POOLS.items() if name in self._columns}
        self._scoring = CaptionScoring(scorer, language_model, clip_prefix=self.clip_prefix, pools=pools)
        self._captions = pyarrow.parquet.read_table(self.folder / _CAPTIONS)

    def made_by(self) -> dict[str, Any]:
        from hf_captionrl.retrieval import model_fingerprint

        scorer, language_model = self._scoring.scorer, self._scoring.language_model
        return {
            "scorer": None if scorer is None else scorer.signature,
            "language_model": None if language_model is None else model_fingerprint(language_model[0]),
        }

    def schema(self) -> pa.Schema:
        import pyarrow as pa

        kinds = {"text": pa.list_(pa.float32()), "clip_text": pa.list_(pa.float32()), "nats": pa.float64()}
        return pa.schema({name: kinds.get(name, pa.int64()) for name in self._columns})

    def __call__(self, rows: range) -> list[dict[str, Any]]:
        source, first = divmod(rows.start, self.rows_per_source)
        captions = self._captions.column(source).slice(first, len(rows)).to_pylist()
        found = score_captions_in_blocks(self._scoring, captions, first)
        values = zip(*(found[name] for name in self._columns), strict=True)
        return [dict(zip(self._columns, row, strict=True)) for row in values]


# --- Captions with the numbers that several tables need --------------------------------------------------------------

REFERENCES = "references"
"""Name of the human captions."""


def score_sources(
    sources: Sequence[ScoredCaptions],
    scorer: Any,
    language_model: tuple[Any, Any] | None = None,
    *,
    clip_prefix: str = "",
    pools: Mapping[str, Any] | None = None,
    folder: Path | None = None,
) -> None:
    """Add the scores of the first captions by scorer and language model, computed once for all tables; see `CaptionScoring`.

    Large columns are in temporary files of `folder`.
    """

    scoring = CaptionScoring(scorer, language_model, clip_prefix=clip_prefix, pools=pools)
    for source in sources:
        add_scores(
            source, score_captions_in_blocks(scoring, source.first, folder=folder), scorer, language_model, clip_prefix
        )


def add_scores(
    scored: ScoredCaptions,
    found: Mapping[str, np.ndarray],
    scorer: Any,
    language_model: tuple[Any, Any] | None = None,
    clip_prefix: str = "",
) -> None:
    """Add the columns of `CaptionScoring` to the captions they were computed from, with the same models."""
    import torch

    from hf_captionrl.metrics.perplexity import CaptionLosses, perplexity_of

    if scorer is not None:
        scored.text = torch.from_numpy(found["text"])
        scored.max_text_tokens, scored.scorer = scorer.max_text_tokens, scorer.signature
        scored.tokens = found["tokens"].tolist() if "tokens" in found else None
    if "clip_text" in found:
        scored.clip_text, scored.clip_prefix = torch.from_numpy(found["clip_text"]), clip_prefix
    scored.image_ranks, scored.pool_ranks = found.get("image_rank"), found.get("pool_rank")
    if language_model is not None:
        model = language_model[0]
        losses = CaptionLosses(torch.from_numpy(found["nats"]), torch.from_numpy(found["scored_tokens"]), None)
        scored.perplexity = lambda captions: perplexity_of(losses, model)


def count_copies(image_features: Any) -> int:
    """Number of images in a pool of features `(M, D)` that are copies of an earlier one: false negatives of its captions."""
    from hf_captionrl.retrieval.ranking import duplicate_images

    return sum(first != row for row, first in enumerate(duplicate_images(image_features).tolist()))


def human_captions(evaluator: Evaluator) -> ScoredCaptions | None:
    """One random reference per image, compared with the others (SMILE, Table 1); None if an image has one reference."""
    from hf_captionrl.data.columns import TEXTS, in_arrow
    from hf_captionrl.evaluation.evaluator import ScoredCaptions, draw_references

    drawn = draw_references(evaluator.references, evaluator.seed)
    if not all(len(group) > 1 for group in drawn):
        return None
    return ScoredCaptions(REFERENCES, drawn, in_arrow((group[1:] for group in drawn), TEXTS), is_human=True)
