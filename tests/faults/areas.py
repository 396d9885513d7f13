"""All areas of the campaign."""

from tests.faults import of_data, of_training  # noqa: F401
from tests.faults.campaign import AREAS, run_area

__all__ = ["AREAS", "run_area"]
