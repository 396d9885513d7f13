"""The scorer of these tests."""

JUDGE = "scenes:siglip-held-out"
