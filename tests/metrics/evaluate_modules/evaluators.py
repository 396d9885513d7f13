"""The scorer of these tests."""

SCORER = "scenes:clip-reward"
