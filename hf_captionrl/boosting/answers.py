"""What a usable answer looks like: cleaned up, and checked by rules that are written down here.

The rules are words and counts, no model: what they catch is what language models do wrong in bulk. They judge the form of
an answer, never whether it is true (`conflicts.py` looks at that).
"""

from __future__ import annotations

import re

from hf_captionrl.boosting.prompts import Prompt
from hf_captionrl.data.cleaning import clean_caption

__all__ = ["ANSWER_WAYS_OUT", "MAX_ANSWER_WORDS", "answer_fault", "clean_answer"]

MAX_ANSWER_WORDS = 120
"""Longest accepted answer in whitespace words; the paper's visual captions have 51, with a deviation of 14 (Table 9)."""

ANSWER_WAYS_OUT: dict[str, str] = {
    "answer_empty": "ask another model, or leave the image out",
    "answer_refuses": "ask another model, or leave the image out",
    "answer_repeats_prompt": "use a model tuned to follow instructions, or check its chat template",
    "answer_not_english": "use a model that answers in English, or translate the references first",
    "answer_too_long": "lower max_new_tokens, or raise max_words",
    "backend_failed": "give the same command again once the backend answers",
    "backend_rejected": "read what the backend says of this row, mend it, and pass --retry_quarantined",
}
"""What can be wrong with an answer, and the way out of each."""

_LABEL = re.compile(
    r"^\W*(?:assistant|answer|caption|(?:holistic|blended|improved|correct|final|generated)\s+caption)\s*:\s*", re.I
)
# A model without a stop token goes on with the next example of the prompt.
_NEXT_TURN = re.compile(
    r"\s(?:\*\*)?(?:User|Human|Assistant|Reference caption \d+|Correct caption)(?:\*\*)?\s*:.*", re.S
)
_REFUSAL = re.compile(
    r"\b(?:i['’]?m sorry|i am sorry|i apologi[sz]e|as an ai\b|as a language model|i (?:cannot|can['’]?t|can not|am unable|"
    r"am not able|won['’]?t|will not)\b|i['’]m (?:unable|not able)|unable to (?:view|see|process|assist|describe)|"
    r"(?:no|without (?:an?|the)) image (?:was |is |has been )?(?:provided|attached|given))",
    re.I,
)
_REFUSAL_WITHIN = 120  # a refusal comes first; a quoted "I can't" late in a long caption is none
_PROMPT_MARKS = (
    "reference caption",
    "reference set",
    "correct caption",
    "new caption",
    "new noisy caption",
    "system prompt",
    "three examples are shown",
    "briefly describe the content",
)
_ENGLISH = frozenset(
    "a an the of in on at with and is are to for from by near next over under behind front while it its this that there "
    "his her their some two three as into onto up down has have being who which".split()
)
_FOREIGN = frozenset(
    "der die das und ein eine einem einen ist mit auf im dem den le la les un une et est des du dans sur avec qui el los "
    "las y con una del en por il di che della su per uno o um uma com no na os de het een van op met".split()
)


def clean_answer(text: str) -> str:
    """The caption in an answer: one line, without role names, quotes, or the turns that a model invents after it.

    Args:
        text (`str`): As the model gave it.

    Returns:
        `str`: The caption; empty if there is none.
    """
    text = _NEXT_TURN.sub("", _LABEL.sub("", text.strip()))
    text = clean_caption(text)
    for first, last in (('"', '"'), ("“", "”"), ("'", "'")):
        if len(text) > 1 and text[0] == first and text[-1] == last and first not in text[1:-1]:
            text = text[1:-1].strip()
    return text


def _is_english(text: str) -> bool:
    letters = [c for c in text if c.isalpha()]
    if sum(c.isascii() for c in letters) < 0.8 * len(letters):
        return False
    words = re.findall(r"[^\W\d_]+", text.lower())
    english, foreign = (sum(word in listed for word in words) for listed in (_ENGLISH, _FOREIGN))
    return foreign <= english and (english > 0 or len(words) < 8)


def answer_fault(text: str, prompt: Prompt, *, max_words: int = MAX_ANSWER_WORDS) -> tuple[str, str] | None:
    """What is wrong with a cleaned answer, if anything.

    - `answer_empty`: no letter or digit.
    - `answer_refuses`: a phrase of refusal ("I'm sorry", "as an AI", "I cannot", ...) in the first 120 characters.
    - `answer_repeats_prompt`: it holds a phrase of the prompts ("Reference caption", "Correct caption", ...), is what the
      user said, or is the answer of a worked example.
    - `answer_too_long`: more than `max_words` whitespace words.
    - `answer_not_english`: fewer than 80 % of its letters are ASCII; or it holds more of some 50 function words of six
      other languages than of some 50 of English; or it has 8 words or more and no function word of English.

    Args:
        text (`str`): After `clean_answer`.
        prompt ([`Prompt`]): What was asked.
        max_words (`int`): Longest accepted answer.

    Returns:
        `tuple[str, str] | None`: A key of `ANSWER_WAYS_OUT` and a sentence with the value, or `None` if all is well.
    """
    shown = repr(text if len(text) <= 60 else text[:60] + "...")
    if not any(map(str.isalnum, text)):
        return "answer_empty", f"the answer {shown} has no letter or digit"
    if _REFUSAL.search(text[:_REFUSAL_WITHIN]):
        return "answer_refuses", f"the answer {shown} is a refusal"
    lowered = text.lower()
    copied = any(lowered == answer.lower() for _, answer in prompt.examples)
    if copied or lowered == prompt.user.lower() or any(mark in lowered for mark in _PROMPT_MARKS):
        return "answer_repeats_prompt", f"the answer {shown} repeats the prompt"
    words = len(text.split())
    if words > max_words or len(text) > 20 * max_words:  # scripts without spaces make one word of a sentence
        return "answer_too_long", f"the answer {shown} has {words} words, more than {max_words}"
    if not _is_english(text):
        return "answer_not_english", f"the answer {shown} is not English by the words it is made of"
    return None
