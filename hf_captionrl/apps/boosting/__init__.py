"""Visual Caption Boosting: richer references from human captions, a language model and a vision model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_captionrl.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from hf_captionrl.apps.boosting.backends import SceneDescriber, SceneWriter
    from hf_captionrl.apps.boosting.boost import (
        BoostedFile,
        boost_shard,
        write_boosted_captions,
    )
    from hf_captionrl.apps.boosting.conflicts import (
        Conflict,
        scene_conflicts,
        source_statistics,
        text_conflicts,
        write_source_histogram,
    )
    from hf_captionrl.apps.boosting.prompts import (
        ANSWER_REMEDIES,
        STAGES,
        answer_fault,
        blend_prompt,
        clean_answer,
        holistic_prompt,
        visual_prompt,
    )

__getattr__, __all__ = lazy_names(__name__)
