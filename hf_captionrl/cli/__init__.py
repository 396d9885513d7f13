"""The command line, `captionrl`: write captions, compare captioners, place the metrics where `evaluate` finds them.

One file a subcommand. Parsing imports nothing heavy, so that `--help` answers at once.
"""

from hf_captionrl.cli.main import console, main

__all__ = ["console", "main"]
