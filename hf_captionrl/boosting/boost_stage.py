"""Boosting of shards: each asks about its rows, keeps the answers in its journal, and writes its captions."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from hf_captionrl.boosting.answers import ANSWER_REMEDIES
from hf_captionrl.boosting.backends import is_local
from hf_captionrl.boosting.prompts import STAGES
from hf_captionrl.engine import ShardFolder, Stage
from hf_captionrl.engine.parquet_shard import read_shard
from hf_captionrl.evaluation.dataset_options import load_split

if TYPE_CHECKING:
    import pyarrow as pa

    from hf_captionrl.boosting.options import BoostOptions

__all__ = ["BoostStage", "reopen_shards"]

_ROLES = ("text", "vision")


class BoostStage(Stage):
    """Boosted captions of shards; see `boosted_rows`."""

    def __init__(self, options: BoostOptions, ids: str) -> None:
        self.options, self.ids = copy.copy(options), ids
        self.needs_gpu = any(is_local(options, role) for role in _ROLES)

    def load(self) -> None:
        from hf_captionrl.boosting.backends import load_backend

        self._dataset = load_split(self.options, quarantine_path=None, expected_ids=self.ids).dataset
        self._backends = {role: load_backend(self.options, role, self._dataset) for role in _ROLES}

    def made_by(self) -> dict[str, Any]:
        return {role: [backend.model, backend.revision] for role, backend in self._backends.items()}

    def schema(self) -> pa.Schema:
        import pyarrow as pa

        text, texts = pa.string(), pa.list_(pa.string())
        source = pa.struct(dict.fromkeys(("model", "revision", "prompt_hash", "time"), text) | {"attempt": pa.int32()})
        columns = {"row": pa.int64(), "image_id": text, "references": texts, "captions": texts, "conflicts": texts}
        for stage in STAGES:
            columns |= {f"{stage}_caption": text, f"{stage}_source": source}
        return pa.schema({**columns, "quarantine": text})

    def __call__(self, rows: range) -> list[dict[str, Any]]:
        from hf_captionrl.boosting.boosted_file import boosted_rows
        from hf_captionrl.boosting.shards import boost_shard

        options = self.options
        boost_shard(
            self._dataset,
            options.output,
            **self._backends,
            rows=rows,
            attempts=options.attempts,
            max_words=options.max_words,
            rows_at_once=options.rows_at_once,
            max_bad_fraction=None,  # checked before, over all rows
            max_failures=options.max_failures,
            retry_quarantined=options.retry_quarantined,
        )
        exact = options.dataset == "scenes"
        return boosted_rows(self._dataset, options.output, **self._backends, rows=rows, exact_facts=exact)


def reopen_shards(shards: ShardFolder, retry_quarantined: bool) -> None:
    """Remove finished shards that may gain rows: a backend failed, an image was broken, or `retry_quarantined`."""
    missing = set(shards.unfinished())
    for shard, name in enumerate(shards.names):
        if shard in missing or not shards.is_mine(shard):
            continue
        column = read_shard(shards.folder / name, ["quarantine"])["quarantine"]
        reasons = {json.loads(line)["reason"] for line in column.to_pylist() if line is not None}
        if reasons - (ANSWER_REMEDIES.keys() - {"backend_failed"}) or (retry_quarantined and reasons):
            (shards.folder / name).unlink()
