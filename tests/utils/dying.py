"""Stages with real models, whose process is killed once before a shard is written."""

import os
import signal
from pathlib import Path

from hf_captionrl.cli.caption import CaptionStage
from hf_captionrl.cli.features import FeatureStage
from hf_captionrl.evaluation.scored_captions import ScoreStage


class DiesOnce:
    """Kills its process after the shard with row `kill_at` is computed, and before it is written."""

    def __init__(self, *args, notes, kill_at, **kwargs):
        super().__init__(*args, **kwargs)
        self.notes, self.kill_at = Path(notes), kill_at

    def load(self):
        super().load()
        (self.notes / f"loaded-{os.getpid()}").touch()

    def __call__(self, rows):
        found = super().__call__(rows)
        if self.kill_at in rows and not list(self.notes.glob("killed-*")):
            (self.notes / f"killed-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return found


class DyingFeatures(DiesOnce, FeatureStage):
    pass


class DyingCaptions(DiesOnce, CaptionStage):
    pass


class DyingScores(DiesOnce, ScoreStage):
    pass
