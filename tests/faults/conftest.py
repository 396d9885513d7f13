"""One warm process for all tests of faults."""

import pytest

from tests.faults.nursery import Nursery


@pytest.fixture(scope="session")
def nursery():
    with Nursery() as warm:
        yield warm
