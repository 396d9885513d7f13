"""A small project in which a fault is planted."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def plant(root, files):
    """A small project: path -> text."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def messages(faults):
    return [str(fault) for fault in faults]
