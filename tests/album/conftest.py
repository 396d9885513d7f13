"""The Hub of a test, for the Space."""

from tests.hub.conftest import hub

__all__ = ["hub"]
