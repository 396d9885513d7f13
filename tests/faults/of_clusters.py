"""Faults on a Ray cluster: an actor is killed in the middle of a shard."""

from __future__ import annotations

from collections import Counter

from hf_captionrl.utils.options import EngineOptions
from hf_captionrl.utils.parts import ShardFolder, read_shards, run_stage
from tests.faults.campaign import Trial, area
from tests.utils.toy import Squares, expected, pids, two_nodes

ROWS, PER_SHARD = 23, 4


@area("ray", "kill -9 of an actor on a Ray cluster of two nodes")
def killed_actor(warm_process, folder, rng, kills):
    with two_nodes() as address:
        for number in range(kills):
            notes = folder / f"notes-{number}"
            notes.mkdir()
            shards = ShardFolder(folder / str(number), {"run": number}, num_rows=ROWS, rows_per_shard=PER_SHARD)
            stage = Squares(notes, kill_at=rng.randrange(ROWS))
            run_stage(stage, shards, EngineOptions(engine="ray", address=address))
            rows = list(read_shards(folder / str(number)))
            times = Counter(row["row"] for row in rows)
            fine = rows == expected(ROWS, PER_SHARD) and len(pids(notes, "killed")) == 1
            yield Trial(fine, ROWS - len(times), len(rows) - len(times), "" if fine else f"rows {sorted(times)}")
