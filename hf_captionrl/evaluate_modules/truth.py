"""What an image holds, as the module `caption_faithfulness` takes it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hf_captionrl.evaluate_modules.prediction_columns import is_missing

__all__ = ["as_text", "objects_and_facts", "scene_check"]

# No name of an object has more words; a reference caption has.
_LONGEST_NAME = 4


def as_text(references: Any) -> Any:
    """Facts as JSON, which a column of strings can hold."""
    if references is None or isinstance(references, str | Mapping):
        return references
    return [json.dumps(row) if isinstance(row, Mapping) else row for row in references]


def objects_and_facts(
    references: Sequence[Any] | None, objects: Sequence[Any] | None, facts: Sequence[Any] | None
) -> tuple[Sequence[Any] | None, Sequence[Any] | None]:
    """Lists of objects and mappings of facts, whichever were given."""
    if objects is not None or facts is not None:
        return objects, facts
    if is_missing(references) or references is None:
        raise ValueError("nothing to hold captions against. Pass references, objects= or facts=.")
    if isinstance(references[0], list):
        for i, names in enumerate(references):
            long = next((name for name in names if len(name.split()) > _LONGEST_NAME), None)
            if long is not None:
                raise ValueError(
                    f"references[{i}] holds {long!r}, which is no name of an object. Pass lists of objects, or objects= "
                    "where references are captions for another module."
                )
        return references, None
    parsed = []
    for i, text in enumerate(references):
        try:
            parsed.append(json.loads(text))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"references[{i}] is the string {text!r:.60}, neither a list of objects nor facts as JSON ({error})."
            ) from None
    return None, parsed


def scene_check(caption: str, facts: Mapping[str, Any]) -> Any:
    """The exact checker of the embedded scenes."""
    from hf_captionrl.scenes import check

    return check(caption, facts)
