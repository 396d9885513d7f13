"""Page of the Space: `captionrl demo` with the arguments in `arguments.txt`, one per line."""

import sys
from pathlib import Path

from hf_captionrl.cli import main

ARGUMENTS = Path(__file__).with_name("arguments.txt").read_text(encoding="utf-8").splitlines()

if __name__ == "__main__":
    # A Space's container must accept outside connections, at the port that Spaces expect.
    sys.exit(main(["demo", "--host", "0.0.0.0", "--port", "7860", "--no_browser", *ARGUMENTS]))
