"""Work on shards of rows: in this process, in several processes of one machine, or on a Ray cluster."""

from hf_captionrl.engine.options import EngineOptions
from hf_captionrl.engine.run import run_stage
from hf_captionrl.engine.shards import (
    MANIFEST,
    ShardFolder,
    launched,
    read_manifest,
    read_shards,
    read_tables,
    refuse_other_settings,
    shard_files,
)
from hf_captionrl.engine.stages import Stage, seed_of_batch

__all__ = [
    "MANIFEST",
    "EngineOptions",
    "ShardFolder",
    "Stage",
    "launched",
    "read_manifest",
    "read_shards",
    "read_tables",
    "refuse_other_settings",
    "run_stage",
    "seed_of_batch",
    "shard_files",
]
