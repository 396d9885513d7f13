"""Scores of captions by a scorer and a language model, computed once for all tables, in blocks: in this process, or in parts.

Because of rounding, features and losses depend on the batch, and batches depend on all captions of a call. Both ways therefore
process the same blocks of captions, and on one machine their numbers are bit-identical.

Legend: N captions of a source, one per image; B of them in a block; M images of a pool, D features.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hf_captionrl.metrics.caption_checks import spoken
from hf_captionrl.metrics.perplexity import CaptionLosses, caption_losses, perplexity_of
from hf_captionrl.retrieval import TokenScorer
from hf_captionrl.retrieval.ranking import duplicate_images, ranks, unit_rows
from hf_captionrl.utils.io import atomic_write_bytes
from hf_captionrl.utils.parts import MakePart

if TYPE_CHECKING:
    import pyarrow as pa

    from hf_captionrl.evaluation.evaluator import ScoredCaptions
    from hf_captionrl.retrieval import Scorer

BLOCK = 256
"""Captions that are encoded together."""

REFERENCES = "references"
"""Name of the human captions."""

_IN_MEMORY = 2**28
"""Bytes of a column from which it is in a file."""

_CAPTIONS = "captions.parquet"
_POOLS = {"image_rank": "images.npy", "pool_rank": "pool.npy"}


class CaptionScoring:
    """Computes columns of numbers for a block of captions. Columns whose model is not given are missing.

    `scorer` computes `text` `(B, D)`; with `clip_prefix` also `clip_text`, the captions after the prefix; and `tokens` if it
    counts tokens. `language_model`, `(model, tokenizer)`, computes `nats` and `scored_tokens`, the losses of the captions.
    `pools` are features `(M, D)` by the name of a column, which contains the rank of each caption's image among them; image i
    of a pool belongs to caption i.
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
        self.pools = pools or {}

    def columns(self) -> list[str]:
        """Names of the columns."""
        found = [*self.pools]
        if self.scorer is not None:
            found += ["text", *(["clip_text"] if self.clip_prefix else [])]
            # Other implementations of a scorer need not count tokens.
            found += ["tokens"] if isinstance(self.scorer, TokenScorer) else []
        return found + (["nats", "scored_tokens"] if self.language_model is not None else [])

    @cached_property
    def _unit_pools(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Features of unit length, and the first image equal to each."""
        device = getattr(self.scorer, "device", "cpu")
        units = {name: unit_rows(torch.as_tensor(features).to(device)) for name, features in self.pools.items()}
        return {name: (unit, duplicate_images(unit)) for name, unit in units.items()}

    def blocks(self, captions: Sequence[str], first: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """Columns of captions whose images are `first`, `first + 1`, ..., block by block; `first` is a multiple of `BLOCK`."""
        for at in range(0, len(captions), BLOCK):
            texts = spoken(captions[at : at + BLOCK])
            found: dict[str, np.ndarray] = {}
            if self.scorer is not None:
                text = self.scorer.text_features(texts)
                found["text"] = text.float().cpu().numpy()
                if self.clip_prefix:
                    prefixed = self.scorer.text_features([self.clip_prefix + caption for caption in texts])
                    found["clip_text"] = prefixed.float().cpu().numpy()
                if isinstance(self.scorer, TokenScorer):
                    found["tokens"] = np.asarray(self.scorer.count_tokens(texts), dtype=np.int64)
                targets = torch.arange(first + at, first + at + len(texts))
                for name, (images, first_row) in self._unit_pools.items():
                    rows = unit_rows(text.float().to(images.device))
                    found[name] = ranks(rows, images, targets, duplicate_of=first_row).numpy()
            if self.language_model is not None:
                losses = caption_losses(texts, *self.language_model)
                found |= {"nats": losses.nats.numpy(), "scored_tokens": losses.tokens.numpy()}
            yield found


def whole_columns(
    parts: Iterable[Mapping[str, np.ndarray]], number: int, folder: Path | None = None
) -> dict[str, np.ndarray]:
    """Columns of the next `number` captions, from parts of them; large ones are in temporary files of `folder`."""
    found: dict[str, np.ndarray] = {}
    given, at = iter(parts), 0
    while at < number:
        part = next(given)
        for name, values in part.items():
            if at == 0:
                shape, dtype = (number, *values.shape[1:]), values.dtype
                if folder is None or np.prod(shape, dtype=np.int64) * dtype.itemsize < _IN_MEMORY:
                    found[name] = np.empty(shape, dtype)
                else:  # so that the system can release its pages
                    folder.mkdir(parents=True, exist_ok=True)
                    with tempfile.TemporaryFile(dir=folder) as file:
                        found[name] = np.memmap(file, dtype, "w+", shape=shape)
            found[name][at : at + len(values)] = values
        at += len(next(iter(part.values())))
    return found


def score_sources(
    sources: Sequence[ScoredCaptions],
    scoring: CaptionScoring,
    parts: Iterable[Mapping[str, np.ndarray]] | None = None,
    *,
    folder: Path | None = None,
) -> None:
    """Add the columns of a scoring to the captions of each source, computed here or by other processes as `parts`."""
    scorer, sources = scoring.scorer, [single for source in sources for single in source.singles]
    if not scoring.columns():
        return
    given = iter(parts or (part for source in sources for part in scoring.blocks(source.first)))
    for source in sources:
        found = whole_columns(given, len(source.captions), folder)
        if scorer is not None:
            source.text = torch.from_numpy(found["text"])
            source.max_text_tokens, source.scorer = scorer.max_text_tokens, scorer.signature
            source.tokens = found["tokens"].tolist() if "tokens" in found else None
        if "clip_text" in found:
            source.clip_text, source.clip_prefix = torch.from_numpy(found["clip_text"]), scoring.clip_prefix
        source.image_ranks, source.pool_ranks = found.get("image_rank"), found.get("pool_rank")
        if scoring.language_model is not None:
            losses = CaptionLosses(torch.from_numpy(found["nats"]), torch.from_numpy(found["scored_tokens"]), None)
            model = scoring.language_model[0]
            source.perplexity = lambda captions, losses=losses, model=model: perplexity_of(losses, model)  # type: ignore[misc]


# --- The same in several processes -----------------------------------------------------------------------------------


def write_inputs(folder: Path, captions: Sequence[Sequence[str]], pools: Mapping[str, Any]) -> None:
    """Write what the workers of [`ScoreParts`] read, if it is not there: the captions of each source, and features of images."""
    import pyarrow as pa
    import pyarrow.parquet

    if (folder / _CAPTIONS).exists():
        return
    for name, features in pools.items():
        buffer = io.BytesIO()
        np.save(buffer, torch.as_tensor(features).cpu().numpy())
        atomic_write_bytes(folder / _POOLS[name], buffer.getvalue())
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({str(source): list(texts) for source, texts in enumerate(captions)}), buffer)
    atomic_write_bytes(folder / _CAPTIONS, buffer.getvalue())


class ScoreParts(MakePart):
    """Columns of [`CaptionScoring`] for the captions of several sources, one source after the other.

    Each source begins with a new part: row `s * rows_per_source + i` is caption i of source s, and rows after
    the last caption of a source have no result. `models` are the arguments of `load_evaluators`.
    """

    def __init__(
        self,
        folder: Path,
        rows_per_source: int,
        models: tuple[str, str | None, str | None],
        clip_prefix: str,
        columns: Sequence[str],
    ) -> None:
        self.folder, self.rows_per_source = folder.absolute(), rows_per_source
        self.models, self.clip_prefix, self._columns = models, clip_prefix, tuple(columns)

    def load(self) -> dict[str, Any]:
        import pyarrow.parquet

        from hf_captionrl.evaluation.options import load_evaluators
        from hf_captionrl.retrieval import model_fingerprint

        scorer, language_model, _ = load_evaluators(*self.models)
        pools = {name: np.load(self.folder / file) for name, file in _POOLS.items() if name in self._columns}
        self._scoring = CaptionScoring(scorer, language_model, clip_prefix=self.clip_prefix, pools=pools)
        self._captions = pyarrow.parquet.read_table(self.folder / _CAPTIONS)
        return {
            "scorer": None if scorer is None else scorer.signature,
            "language_model": None if language_model is None else model_fingerprint(language_model[0]),
        }

    def __call__(self, rows: range) -> pa.Table:
        import pyarrow as pa

        source, first = divmod(rows.start, self.rows_per_source)
        captions = self._captions.column(source).slice(first, len(rows)).to_pylist()
        blocks = self._scoring.blocks(captions, first)
        values = (row for found in blocks for row in zip(*(found[name] for name in self._columns), strict=True))
        kinds = {"text": pa.list_(pa.float32()), "clip_text": pa.list_(pa.float32()), "nats": pa.float64()}
        schema = pa.schema({name: kinds.get(name, pa.int64()) for name in self._columns})
        return pa.Table.from_pylist([dict(zip(self._columns, row, strict=True)) for row in values], schema=schema)


def columns_of_table(table: pa.Table) -> dict[str, np.ndarray]:
    """The columns of a part of [`ScoreParts`]."""
    found = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        is_list = hasattr(column, "flatten") and column.type.num_fields
        found[name] = column.flatten().to_numpy().reshape(len(column), -1) if is_list else column.to_numpy()
    return found
