"""Faithfulness: CHAIR with object lists, and any checker of facts.

Every retrieval number is shown with one of these, because captions that retrieve their image can still be wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from hf_captionrl.metrics.bootstrap import signature
from hf_captionrl.metrics.caption_checks import check_captions
from hf_captionrl.metrics.coco_objects import COCO_COMPOUNDS, COCO_OBJECTS
from hf_captionrl.text.tokenize import ptb_tokenize


def faithfulness(captions: Any, facts: Sequence[Any], check: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Share of wrong claims, and of mentioned facts, according to a checker that knows the facts.

    Args:
        captions: One caption per image.
        facts: Facts of each image, in the form that the checker takes.
        check: Called with a caption and its facts. It returns an object with the attributes `right` and `wrong` (lists of
            claims), `recalled` and `missed` (lists of facts); an example is `hf_captionrl.scenes.check`.
    Returns:
        `dict`: `hallucination`, wrong claims divided by all claims, lower is better; `fact_recall`, mentioned facts divided by
        all facts, higher is better (micro-averages; 0 if there are no claims or facts); `wrong_captions`, share of
        captions with a wrong claim; `per_sample`, the numbers of `right`, `wrong`, `recalled` and `missed` of each caption,
        for the values and weights of [`bootstrap_interval`]; `signature`.
    """
    texts = check_captions(captions)
    if len(texts) != len(facts):
        raise ValueError(f"{len(texts)} captions and {len(facts)} facts. Pass one per caption, in the same order.")
    names = ("right", "wrong", "recalled", "missed")
    numbers: dict[str, list[int]] = {name: [] for name in names}
    for i, (text, truth) in enumerate(zip(texts, facts, strict=True)):
        try:
            result = check(text, truth)
        except (KeyError, TypeError) as error:
            raise ValueError(f"facts[{i}] cannot be checked ({error!r}): {truth!r:.80}.") from error
        for name in names:
            numbers[name].append(len(getattr(result, name)))
    checker = f"{getattr(check, '__module__', '')}.{getattr(check, '__qualname__', type(check).__name__)}"
    total = {name: sum(values) for name, values in numbers.items()}
    return {
        "hallucination": total["wrong"] / max(total["right"] + total["wrong"], 1),
        "fact_recall": total["recalled"] / max(total["recalled"] + total["missed"], 1),
        "wrong_captions": sum(wrong > 0 for wrong in numbers["wrong"]) / len(texts),
        "per_sample": numbers,
        "signature": signature(metric="faithfulness", check=checker, average="micro"),
    }


def chair(
    captions: Any,
    objects: Sequence[Iterable[str]],
    *,
    synonyms: Mapping[str, Iterable[str]] | Literal["coco"] | None = None,
) -> dict[str, Any]:
    """CHAIR: objects that captions name and images do not contain.

    Reference: Rohrbach et al. 2018, "Object Hallucination in Image Captioning", Eq. 1-2.
    Differs from it by: plurals are reduced by spelling rules (`-s`, `-es`, `-ies` and a few irregular ones), not by a
    lexicon.

    Args:
        captions: One caption per image.
        objects: Names of the objects in each image (annotated objects, or objects of its references).
        synonyms: Other names of each object, of one word or several ("hot dog"); `"coco"`: those of COCO's 80 objects,
            [`hf_captionrl.metrics.coco_objects.COCO_OBJECTS`], without compounds of other things such as "train track"; `None`:
            only the names in `objects`. Only objects that are a key or occur in `objects` are searched for.
    Returns:
        `dict`: `chair_i`, mentions of absent objects divided by all mentions; `chair_s`, share of captions with such a mention;
        lower is better; `object_recall`, share of the images' objects that are mentioned; `num_mentions`, `num_wrong`,
        `num_objects` (of all images) and `num_captions`, the counts; `per_sample`, lists `wrong` and `mentioned` of names;
        `signature`. Where no object was recognised, `chair_i` and `chair_s` are not defined: None, and `chair_i_reason` says
        so; `object_recall` is None if the images have no objects.
    """
    texts = check_captions(captions)
    if len(texts) != len(objects):
        raise ValueError(f"{len(texts)} captions and {len(objects)} lists of objects. Pass one list per caption.")
    if isinstance(synonyms, str):
        if synonyms != "coco":
            raise ValueError(f"synonyms is {synonyms!r}. Use 'coco', or a mapping of objects to lists of names.")
        synonyms = COCO_OBJECTS
    meaning: dict[tuple[str, ...], str] = {}
    for name, others in (synonyms or {}).items():
        for other in (name, *others):
            key = _lemmas(other)
            if meaning.setdefault(key, name) != name:
                raise ValueError(f"{other!r} is a synonym of both {meaning[key]!r} and {name!r}. Keep one.")
    there = []
    for i, names in enumerate(objects):
        if isinstance(names, str):
            raise ValueError(f"objects[{i}] is the string {names!r}. Pass a list of names.")
        there.append({meaning.setdefault(_lemmas(name), name) for name in names})
    known = {"objects": len(set(meaning.values())), "names": len(meaning)}
    for phrase in COCO_COMPOUNDS if synonyms is COCO_OBJECTS else ():
        meaning.setdefault(_lemmas(phrase), "")
    mentioned = [list(filter(None, found)) for found in _mentions(texts, meaning)]
    wrong = [[name for name in names if name not in present] for names, present in zip(mentioned, there, strict=True)]
    told = sum(len(present & set(names)) for names, present in zip(mentioned, there, strict=True))
    mentions, absent, present_objects = (sum(map(len, lists)) for lists in (mentioned, wrong, there))
    result: dict[str, Any] = {
        "chair_i": absent / mentions if mentions else None,
        "chair_s": sum(bool(names) for names in wrong) / len(texts) if mentions else None,
        "object_recall": told / present_objects if present_objects else None,
        "num_mentions": mentions,
        "num_wrong": absent,
        "num_objects": present_objects,
        "num_captions": len(texts),
        "per_sample": {"wrong": wrong, "mentioned": mentioned},
        "signature": signature(metric="chair", **known, compounds=synonyms is COCO_OBJECTS or None),
    }
    if not mentions:
        reason = f"not defined: no object was recognised in {len(texts)} captions"
        result |= {"chair_i_reason": reason, "chair_s_reason": reason}
    return result


def _mentions(texts: Iterable[str], meaning: Mapping[tuple[str, ...], str]) -> list[list[str]]:
    """What the names in each text mean, in their order."""
    longest = max(map(len, meaning), default=0)
    mentioned = []
    for text in texts:
        words, found, at = _lemmas(text), [], 0
        while at < len(words):
            # The longest name first: a hot dog is not a dog.
            sizes = range(min(longest, len(words) - at), 0, -1)
            size = next((n for n in sizes if words[at : at + n] in meaning), 0)
            if size:
                found.append(meaning[words[at : at + size]])
            at += max(size, 1)
        mentioned.append(found)
    return mentioned


# Words for which the rules of `_singular` are wrong: -ies of -ie, -ses of -s, -ches of -che, -is of -i, and exceptions.
_PLURALS = """
men man women woman people person children child feet foot mice mouse geese goose teeth tooth knives knife leaves leaf
shelves shelf scarves scarf loaves loaf wolves wolf calves calf tvs tv busses bus gases gas lenses lens canvases canvas
irises iris quiches quiche moustaches moustache mustaches mustache sheep sheep canvas canvas alias alias atlas atlas lens lens
""".split()
_WITH_ES = """
alias atlas bonus bus cactus campus circus crocus eucalyptus focus genius hibiscus hippopotamus lotus minibus octopus platypus
status surplus trolleybus virus walrus
""".split()
_WITH_S = """
beanie brownie cookie goalie hoodie magpie movie necktie onesie selfie smoothie zombie bikini broccoli kiwi safari ski taxi
zucchini
""".split()
_IRREGULAR = dict(zip(_PLURALS[::2], _PLURALS[1::2], strict=True))
_IRREGULAR |= {f"{word}es": word for word in _WITH_ES} | {f"{word}s": word for word in _WITH_S}


def _lemmas(text: str) -> tuple[str, ...]:
    """Words of a text in the singular."""
    return tuple(map(_singular, ptb_tokenize(text)))


def _singular(word: str) -> str:
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if re.search(r"(?:ss|x|ch|sh|to)es$", word) and len(word) > 4:
        return word[:-2]
    if len(word) > 3 and word.endswith("s") and not re.search(r"(?:ss|us|is)$", word):
        return word[:-1]
    return word
