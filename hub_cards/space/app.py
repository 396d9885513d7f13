"""Page of the Space: `captionrl demo` with the arguments of `arguments.txt`, one a line."""

import sys
from pathlib import Path

from hf_captionrl.cli import main

ARGUMENTS = Path(__file__).with_name("arguments.txt").read_text(encoding="utf-8").splitlines()

if __name__ == "__main__":
    # In a Space's container the page is reached from outside, at the port that Spaces expect.
    sys.exit(main(["demo", "--host", "0.0.0.0", "--port", "7860", "--no_browser", *ARGUMENTS]))
