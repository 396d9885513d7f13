"""One warm process for all tests of faults."""

import pytest

from tests.faults.warm_process import WarmProcess


@pytest.fixture(scope="session")
def warm_process():
    with WarmProcess() as warm:
        yield warm
