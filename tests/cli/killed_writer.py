"""`captionrl`, killed by the system in the middle of a line."""

import os
import signal

import hf_captionrl.utils.io
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


def write_and_be_killed(last, arguments):
    """Run a command until its n-th write to a growing file; in a separate process."""
    hf_captionrl.utils.io.os = KillingOs(last)
    return main(arguments)
