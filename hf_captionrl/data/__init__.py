"""Images with captions: load from anywhere, check every row, draw one caption per epoch, collate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_captionrl.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from hf_captionrl.data.bag_curriculum import PAPER_SCHEDULE, BagCurriculumSampler
    from hf_captionrl.data.caption_dataset import (
        CaptionCollator,
        CaptionDataset,
        CaptionItem,
        evaluation_rows,
        training_rows,
    )
    from hf_captionrl.data.columns import SourceArguments, frames_of
    from hf_captionrl.data.features import cached_features, cached_pixels, pool_frames
    from hf_captionrl.data.images import MAX_PIXELS, ImageError, open_image
    from hf_captionrl.data.loading import SPLITS, choose_split, load_caption_splits, load_captions
    from hf_captionrl.data.quarantine import ImageReader, QuarantineEntry, QuarantineError, check_captions
    from hf_captionrl.data.simplifying import exchange_captions
    from hf_captionrl.data.video import is_video, open_still, sample_frames, verify_video

__getattr__, __all__ = lazy_names(__name__)
