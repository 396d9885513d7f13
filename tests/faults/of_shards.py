"""Faults of finished results: a shard is damaged on disk."""

from __future__ import annotations

import shutil
import warnings

from hf_captionrl.utils.parts import ShardFolder, read_shards, run_stage
from tests.faults.campaign import Trial, area, damage
from tests.utils.toy import Squares, expected

ROWS, PER_SHARD = 2_000, 400


def result(folder, notes):
    """Give the same command again, and read the rows as other commands do."""
    shards = ShardFolder(folder, {"model": "m"}, num_rows=ROWS, rows_per_shard=PER_SHARD)
    run_stage(Squares(notes), shards)
    return list(read_shards(folder))


@area("shards", "a shard of a finished result is truncated or removed")
def damaged_shard(warm_process, folder, rng, kills):
    """The same command repairs the result, or its error names the file to remove; no damage is read as data."""
    notes = folder / "notes"
    notes.mkdir()
    rows = expected(ROWS, PER_SHARD)
    assert result(folder / "whole", notes) == rows
    for number in range(kills):
        copy = folder / str(number)
        shutil.copytree(folder / "whole", copy)
        part = rng.choice(sorted(copy.glob("part-*")))
        before = {path: path.read_bytes() for path in copy.glob("part-*") if path != part}
        what = damage(part, rng, kinds=("truncated", "removed"))
        found, note = [], what
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # names the shards that are written again
            try:
                found = result(copy, notes)
            except ValueError as error:
                note = f"{what}: {error}"
                if f"{part} is damaged" in str(error):
                    part.unlink()
                    found = result(copy, notes)
        lost = sum(not path.is_file() or path.read_bytes() != data for path, data in before.items())
        times = len(found) - len({row["row"] for row in found})
        yield Trial(found == rows and not lost, lost, times, note)
        shutil.rmtree(copy)
