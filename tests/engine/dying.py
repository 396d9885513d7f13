"""Stages with real models, whose process is killed once in the middle of a shard."""

import os
import signal
from pathlib import Path

from hf_captionrl.evaluation.caption_stage import CaptionStage
from hf_captionrl.evaluation.write_features import FeatureStage
from hf_captionrl.evaluation.write_pixels import PixelStage


class DiesOnce:
    """Kills its process after the batch with row `kill_at` is computed, and before its shard is written."""

    def __init__(self, *args, notes, kill_at, **kwargs):
        super().__init__(*args, **kwargs)
        self.notes, self.kill_at = Path(notes), kill_at

    def load(self):
        super().load()
        (self.notes / f"loaded-{os.getpid()}").touch()

    def batch(self, rows):
        found = super().batch(rows)
        if self.kill_at in rows and not list(self.notes.glob("killed-*")):
            (self.notes / f"killed-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


class DyingFeatures(DiesOnce, FeatureStage):
    pass


class DyingCaptions(DiesOnce, CaptionStage):
    pass


class DyingPixels(DiesOnce, PixelStage):
    pass
