"""The record of what was reproduced: programs, results, findings and predictions. Nothing in the package imports it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "reproduction" / "results"
