"""`captionrl`, killed by the system in the middle of a line: a program for test_caption.py.

The first argument says at which write to the captions; the others are the command line's.
"""

import os
import signal
import sys

import hf_captionrl.io
from hf_captionrl.cli import main


class KillingOs:
    """The module `os`, whose `write` stops half-way."""

    def __init__(self, last):
        self.left = last

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, file, data):
        self.left -= 1
        if self.left:
            return os.write(file, data)
        os.write(file, data[: len(data) // 2 + 3])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


if __name__ == "__main__":
    hf_captionrl.io.os = KillingOs(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
