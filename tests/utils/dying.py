"""Parts with real models, whose process is killed once before a part is written."""

import os
import signal
from pathlib import Path

from hf_captionrl.cli.caption import CaptionParts


class DiesOnce:
    """Kills its process after the part with row `kill_at` is computed, and before it is written."""

    def __init__(self, *args, notes, kill_at, **kwargs):
        super().__init__(*args, **kwargs)
        self.notes, self.kill_at = Path(notes), kill_at

    def load(self):
        (self.notes / f"loaded-{os.getpid()}").touch()
        return super().load()

    def __call__(self, rows):
        found = super().__call__(rows)
        if self.kill_at in rows and not list(self.notes.glob("killed-*")):
            (self.notes / f"killed-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


class DyingCaptions(DiesOnce, CaptionParts):
    pass
