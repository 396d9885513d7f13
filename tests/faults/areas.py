"""All areas of the campaign, in the order of the table."""

from tests.faults import of_clusters, of_data, of_machines, of_shards, of_training  # noqa: F401
from tests.faults.campaign import AREAS as _AREAS
from tests.faults.campaign import run_area

__all__ = ["AREAS", "run_area"]

_ORDER = (
    "training",
    "saving",
    "signals",
    "signal_rank",
    "two_runs",
    "worker",
    "rank",
    "full_disk",
    "read_only",
    "features",
    "cache",
    "pixels",
    "bags",
    "captions",
    "evaluation",
    "boosting",
    "push",
    "shards",
    "ray",
)
AREAS = {name: _AREAS[name] for name in _ORDER}
assert set(AREAS) == set(_AREAS)
