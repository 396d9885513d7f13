"""Models of an album that kill their process in the middle of a batch, once."""

import os
import signal
from functools import cached_property
from pathlib import Path

from hf_captionrl.apps.album.command import KeptWork


class DyingWork(KeptWork):
    """The first process that samples captions dies; `killed-PID` is left in the working folder."""

    @cached_property
    def captioner(self):
        captioner = KeptWork.captioner.func(self)
        real = captioner.generate

        def generate(**inputs):
            if inputs["do_sample"] and not list(Path().glob("killed-*")):
                Path(f"killed-{os.getpid()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return real(**inputs)

        captioner.generate = generate
        return captioner
