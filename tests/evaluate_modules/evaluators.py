"""The scorer of these tests."""

JUDGE = "scenes:clip-judge"
