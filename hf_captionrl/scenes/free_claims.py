"""The open-vocabulary reader of claims: free text about a scene, as published captioners and chat models write it.

It reads phrases by rules, without a tagger: a noun phrase ends with its head, adjectives belong to the noun that they stand
with, and every noun of a thing is a claim. It makes mistakes; docs/scenes.md has its precision and recall.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from hf_captionrl.scenes.truth_checker import Claim
from hf_captionrl.scenes.world import (
    CATEGORIES,
    EMOJI_KINDS,
    NATURAL_COLOURS,
    OPPOSITES,
    POSITIONS,
    ROWS_TO_SECOND,
    SHAPE_KINDS,
    Facts,
    names_of,
    plural,
)

# --- Words -----------------------------------------------------------------------------------------------------------

_MORE_NAMES = """
dog:hound,pup,canine,doggy,doggie,pooch,mutt,terrier,retriever,poodle,dachshund,beagle,bulldog,labrador;cat:feline,kitty,tabby
car:auto,sedan,coupe,convertible,hatchback,motorcar;tree:oak,pine,fir,maple,birch,conifer,evergreen,sapling;horse:equine
house:home,cabin,hut,bungalow,villa,dwelling;ball:basketball,volleyball;horse:stallion,mare,steed,foal,mustang,colt
bus:coach,minibus,double-decker,omnibus;cup:teacup,goblet,chalice,beaker;chair:seat,throne,armchair,stool;cake:gateau,cupcake,torte
book:novel,volume,hardback,hardcover,paperback,tome,textbook;train:steam engine,railway engine,tram;cow:cattle,calf,heifer,ox,bovine
boat:ship,vessel,yacht,dinghy,rowboat,canoe,ferry;pizza:pie;umbrella:parasol,brolly;sheep:ewe,ram;cat:tomcat
hat:cap,fedora,beanie,sombrero,bonnet;clock:timepiece,watch,stopwatch;truck:pickup;duck:mallard,duckling,drake
bicycle:cycle,push-bike,pushbike;shoe:sneaker,boot,trainer,loafer,heel,sandal,slipper;elephant:pachyderm;dress:frock
fish:goldfish,trout,carp;camera:camcorder;rabbit:hare;tent:tepee,teepee,tipi,wigwam;bear:grizzly;burger:cheeseburger
shirt:t-shirt,tshirt,blouse,tee;frog:toad;mushroom:toadstool,fungus;helicopter:chopper,copter
monkey:chimp,chimpanzee,primate;church:cathedral;teapot:kettle;pig:hog,swine,piglet,boar,sow;crown:tiara,diadem,coronet
donut:dough-nut;telephone:handset,receiver;scooter:vespa;cookie:biscuit;castle:fortress,citadel,stronghold;whale:orca
backpack:knapsack,bag,schoolbag;violin:fiddle;parrot:macaw,cockatoo,budgie;bee:bumblebee,honeybee;camel:dromedary
snake:python,viper,cobra,adder;cactus:succulent;pumpkin:jack-o'-lantern,jack-o-lantern,gourd,squash;turtle:tortoise
deer:stag,fawn,reindeer,buck,elk;basket:hamper;trumpet:bugle;rocket:spaceship,spacecraft,missile;fox:vixen;lion:lioness
hen:rooster;peacock:peafowl;kangaroo:wallaby;hedgehog:porcupine;palm:palm tree;balloon:hot air balloon;butterfly:moth
squirrel:chipmunk;tiger:tigress;octopus:squid;drum:snare;tomato:cherry tomato;sunflower:sun-flower;egg:easter egg
"""
_BIRDS, _FISHES = "duck hen penguin owl parrot flamingo peacock", "fish shark whale dolphin octopus crab turtle"
_HYPERNYMS = {
    name: frozenset(kinds.split())
    for names, kinds in {
        "bird fowl": _BIRDS,
        "poultry waterfowl": "duck hen",
        "insect bug": "butterfly bee",
        "flower blossom bloom": "sunflower rose tulip",
        "fruit": "apple banana lemon tomato strawberry pear pumpkin watermelon pineapple",
        "vegetable veggie": "carrot tomato pumpkin mushroom",
        "dessert sweet pastry treat": "cake donut cookie",
        "snack meal dish": " ".join(CATEGORIES["food"]),
        "rodent": "mouse squirrel",
        "reptile": "snake turtle",
        "amphibian": "frog",
        "mammal": " ".join(k for k in CATEGORIES["animal"] if k not in f"{_BIRDS} fish shark octopus crab turtle bee snail frog snake butterfly".split()),
        "creature critter beast": " ".join(CATEGORIES["animal"]),
        "pet": "dog cat rabbit horse parrot mouse fish turtle hedgehog",
        "livestock": "cow sheep pig horse hen duck",
        "crustacean": "crab",
        "mollusk mollusc": "snail octopus",
        "predator carnivore": "tiger lion bear fox shark snake owl dog cat",
        "headgear headwear": "hat crown",
        "garment clothing clothes apparel": "dress shirt hat shoe",
        "footwear": "shoe",
        "instrument": "guitar drum trumpet violin bell",
        "furniture": "chair",
        "structure": " ".join(CATEGORIES["building"]),
        "automobile": "car",
        "aircraft": "helicopter rocket",
        "two-wheeler": "bicycle scooter",
        "container vessel": "cup basket teapot backpack",
        "device gadget": "telephone camera clock",
        "toy": "ball balloon",
        "vegetation": " ".join(CATEGORIES["plant"]),
        "timekeeper": "clock",
    }.items()
    for name in names.split()
}
_IRREGULAR = {"people": "person", "children": "child", "men": "man", "women": "woman", "leaves": "leaf", "calves": "calf"}
_IRREGULAR |= {"fungi": "fungus", "oxen": "ox", "clothes": "clothing", "wolves": "wolf", "knives": "knife", "geese": "goose"}
_SHADES = {
    shade: colour
    for colour, shades in {
        "red": "crimson scarlet maroon ruby burgundy vermilion reddish",
        "blue": "navy azure cyan cobalt sapphire indigo bluish",
        "green": "emerald lime olive mint jade greenish",
        "golden": "gold yellow amber golden yellowish",
        "purple": "violet lavender lilac mauve plum magenta",
        "pink": "rose rose-coloured rose-colored salmon fuchsia pinkish",
        "gray": "grey silver charcoal ash grayish",
        "white": "ivory snow-white whitish",
        "black": "jet-black ebony pitch-black",
        "brown": "beige tan chestnut bronze brownish",
        "orange": "",
        "teal": "turquoise",
    }.items()
    for shade in (colour, *shades.split())
}
_SIZES = dict.fromkeys("small little tiny miniature mini minuscule petite".split(), "small")
_SIZES |= dict.fromkeys("large big huge giant enormous oversized massive gigantic oversize".split(), "large")
_PAINTED = ("red", "blue", "green", "golden", "purple")

_WORDS = {
    "det": "a an the its their his her this these those some any each every all both another our your whose",
    "prep": "in of with from into by at to through across around between among against onto along toward towards during like "
    "than up down out off for on featuring including plus without",
    "conj": "and or but while so yet nor",
    "pron": "it they them he she itself themselves",
    "rel": "that which who",
    "be": "it's that's is are was were be been being look looks seem seems appear appears feel feels turned painted coloured colored tinted "
    "dyed isn aren",
    "show": "there's here's show shows showing depict depicts depicting feature features present presents portray portrays contain contains "
    "display displays showcase showcases see seen visible shown displayed depicted pictured there exist exists include includes "
    "capture captures illustrate illustrates",
    "place": "stand stands standing sit sits sitting lie lies lying rest rests resting located placed positioned set situated lay "
    "appearing hang hangs hanging hover hovers hovering float floats floating arranged perch perched perches stood put "
    "stacked found remain remains piled balanced balancing",
    "modal": "do does did can could may might must will would cannot",
    "skip": "have has had we i one you what as well very quite rather really "
    "also too only just even still already again here now then however though although because since when where if "
    "left right bright dark light deep pale vivid vibrant soft rich other same such own more most less fewer least exactly about almost "
    "half full filled somewhere nearby together away apart outside overall s t else definitely entire whole identical various within "
    "different separate sort kind type version front slightly behind upward upwards forward everywhere elsewhere",
    "background": "background backdrop wall surface sky screen sheet ground canvas backcloth setting",
    "picture": "image picture photo photograph scene view frame drawing illustration artwork painting cartoon composition "
    "graphic render rendering clipart poster snapshot shot",
    "hue": "color colour shade tone hue tint colors colours hues tones shades palette",
    "measure": "piece slice bunch stack pile flock herd bouquet pack group row set bit number line number collection cluster "
    "chunk portion wedge crowd school series array assortment lot sign trace hint single copy copies",
    "general": "object thing item element subject figure somebody someone anybody something anything everything nothing others one ones",
    "part": "tail wheel leg ear eye nose mouth wing feather petal leaf stem branch roof window door chimney mane horn antler hand "
    "face head handle string strap lace sail fur hair skin shell peel core page cover spine flame wick cherry frosting icing "
    "topping chip brim lid spout beak paw hoof trunk body back neck neckline sleeve expression steeple spire texture "
    "eyebrow whisker stripe seed crust stalk thorn spike needle tongue teeth tooth fin tentacle claw pincer hump pouch "
    "headlight taillight windshield bumper mast deck hull rotor blade propeller pedal dial numeral digit foam "
    "tread sole heel button pocket wool fleece quill tip circle streak slot",
    "abstract": "mood atmosphere style feeling feel sense touch quality contrast character impression tone design art air "
    "corner edge center centre side top bottom middle half part position direction distance arrangement lighting shadow space "
    "day time way attention viewer detail depth warmth world life nature winter summer autumn spring moment evening morning "
    "effect pose posture vibe theme pattern focus glow energy charm humor humour simplicity contemplation height pairing sight "
    "end level area section foreground midair motion angle size shape form order midst heaven quarter threat solitude fashion manner place symmetry balance "
    "upside text caption watermark rain snow weather night season hour afternoon dawn dusk "
    "cloud artist silence loneliness solitude birthday comment reminder metaphor symbol dream memory idea story tale joke count lack addition",
}
_ACTIONS = (
    "wear hold carry ride drive chase run swim fly graze sleep eat drink play walk jump grow watch gaze stare smile burn park "
    "move travel make get take lead help provide offer share stay keep point dominate decorate fill cover protect spread reach shine bloom cross lean dance climb fall glow sail roll pull "
    "push face wait use drift pour indicate enjoy guard follow touch bite chew peck crawl peek hide block throw cast bark sing stretch open close bask"
).split()
_NOUNS_IN_ING = frozenset("building ceiling string ring king wing thing painting pudding swing bed shed sled seed weed speed".split())
_NUMBERS = {"one": 1, "single": 1, "lone": 1, "solitary": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}
_NUMBERS |= {"eight": 8, "ten": 10, "dozen": 12, "pair": 2, "couple": 2, "duo": 2, "trio": 3, "1": 1, "2": 2, "3": 3, "4": 4}
_ORDINALS = {"second": 2, "third": 3, "fourth": 4, "another": 2}
_SHOWING = frozenset("show depict feature present portray contain display showcase include capture illustrate".split())
_ABSTRACT_ENDING = re.compile(r".{3,}(?:ness|tion|sion|ity|ism|ance|ence|hood|ship)s?|.{5,}ments?")

_OF_PICTURE = r"(?: (?:row|part|half|edge|third|portion|area|section|left|right|end|corner|side|hand))*"
_ON = r"(?:(?:at|in|near|along|on|toward|towards|to) (?:the )?|the )(?:very |exact |far )?"
_SIDES = r"(?:on|onto|to) (?:its|their|his|her|the|one) sides?"
_PHRASES: tuple[tuple[str, str, str], ...] = (
    # type, value, pattern; the first pattern that matches wins
    ("stop", "", r"[.;:!?]+|[–—]| -+ "),
    ("comma", "", r"[,()\"]"),
    ("relation", "undecided", r"in front of|behind|inside(?: of)?|looking at|looks? at|looks? up at|staring at"),
    ("relation", "above", r"on top of|atop|above|over|on the roof of|higher than"),
    ("relation", "below", r"below|under|underneath|beneath|lower than"),
    ("relation", "beside", r"next to|beside|besides|alongside|adjacent to|by the side of|at the side of"),
    ("relation", "near", r"near(?! the (?:top|bottom|middle|cent|upper|lower))|close to|not far from"),
    ("relation", "left of", r"(?:to|on|at) (?:the |its |their )?(?:immediate |far )?left(?:[- ]hand)?(?: side)?(?: of)?|left of"),
    ("relation", "right of", r"(?:to|on|at) (?:the |its |their )?(?:immediate |far )?right(?:[- ]hand)?(?: side)?(?: of)?|right of"),
    ("orientation", "upside down", r"(?:turned |hanging |standing )?upside[- ]down|inverted|flipped(?: over)?|overturned|wheels up|"
     r"(?:standing |stands? |balancing )?on (?:its|their|his|her) (?:own )?(?:heads?|roofs?|tops?)|wrong way up|head first|legs in the air"),
    ("orientation", "sideways", rf"(?:(?:lying|lies?|lay|tipped|tilted|turned|resting|rests?|fallen|rotated|laid)(?: over)? )?{_SIDES}|sideways|"
     r"(?:tipped|toppled|fell|fallen|knocked|tilted|keeled|rotated|tipping|rolled)(?: over)?(?! from)|slanted|lying down|horizontal(?:ly)?"),
    ("orientation", "upright", r"(?:standing |stands? )?upright|(?:the )?right (?:way|side) up|erect"),
    ("posture", "", r"(?:lying |lies? )?on (?:its|their|his|her) (?:back|belly|stomach)s?(?: \w+)?"),
    ("row", "", r"(?:arranged |lined up |standing |placed )?in (?:a|one) (?:neat |straight |horizontal )?(?:row|line)|side by side|lined up|a row(?= of)"),
    ("position", "top", rf"{_ON}(?:top|upper|highest|uppermost)(?! hat){_OF_PICTURE}"),
    ("position", "bottom", rf"{_ON}(?:bottom|lower|lowest|foot(?= of the)){_OF_PICTURE}"),
    ("position", "middle", rf"{_ON}(?:middle|center|centre|central){_OF_PICTURE}|centered|centred"),
    ("weather", "any", r"(?:rain\w* (?:n?or|and) snow\w*|snow\w* (?:n?or|and) rain\w*|precipitation)"),
    ("weather", "rain", r"(?:in the |in |on a )?(?:pouring |heavy |light |falling )*(?:raining cats and dogs|rain(?:s|y|ing|drops?|fall|storm|ed)?"
     r"(?! ?coat| ?bow)|drizzl\w+|downpour|pouring)(?: day)?"),
    ("weather", "snow", r"(?:in the |in |on a )?(?:heavy |light |falling )*(?:snow(?:s|y|ing|fall|flakes?|storm|ed)?|(?:snow)?flakes|blizzard)(?: day)?"),
    ("weather", "sun", r"(?:in (?:the )?)?(?:bright )?sun(?:ny|shine|lit|light)?(?: (?:day|afternoon|morning))?"),
    ("weather", "", r"(?:clear|cloudless|blue) (?:sky|skies|weather)|(?:clear|fair|dry) (?:weather|day)|dry(?= and|[.,])"),
    ("time", "day", r"by day|(?:in the |during the )?day ?time|(?:in )?(?:broad )?daylight|in the day|during the day"),
    ("time", "night", r"(?:at |by |during the |in the )?night(?:time|fall|ly)?|nocturnal|in the dark|after dark|dark(?= outside)|midnight|"
     r"(?:the |a )?(?:crescent |full |half )?moon(?:light|lit)?"),
    ("alone", "", r"alone|(?:all )?(?:by itself|by themselves|on its own|on their own)|nothing else|in isolation"),
    ("pattern", "plain", r"(?:no|without(?: any| a)?|lacks? any|free of(?: any)?) (?:visible )?(?:patterns?|texture|stripes or dots|dots or stripes|decorations?)|"
     r"plain|solid|unpatterned|unadorned|uniform|unbroken|featureless|single-colou?red|monochrome"),
    ("pattern", "striped", r"(?:(?:vertical |horizontal |diagonal |thin |white |black )*(?:stripes?|lines)|(?:vertically |horizontally )?strip(?:ed|y|ey)|pinstrip\w+|lined)(?: pattern)?"),
    ("pattern", "dotted", r"(?:(?:white |black |small |tiny )*(?:polka[- ]?dots?|dots?|spots)|(?:polka[- ]?)?dott?(?:ed|y)|spott(?:ed|y)|speckle[ds]?)(?: pattern)?"),
    ("pattern", "other", r"checkered|chequered|checked|plaid|tiled|floral|zigzag"),
    ("number", "some", r"several|an? few|many|numerous|multiple|dozens of|a number of|lots of"),
    ("number", "2", r"a (?:pair|couple) of|its twin"),
    ("number", "3", r"a trio of|a group of three"),
    ("neg", "nobody", r"nobody|no one|no people|no persons?|no humans?"),
    ("neg", "", r"no(?: (?:sign|trace|hint)s? of)?|not(?: a single| any)?|without(?: any)?|neither|nor|none|never|nothing|isn't|aren't|doesn't|don't|anything but|rather than|"
     r"instead of|lacks|lacking|free of|far from"),
    ("skip", "", r"(?:suggest|indicat|show|mean)\w* that|contrast\w* with"),
    ("flourish", "", r"as if|as though|giv(?:es|ing|e)|creat(?:es?|ing|ed)|convey\w*|evok\w+|add(?:s|ing)|mak(?:es|ing)|lend(?:s|ing)?|"
     r"(?:feels?|looks?|seems?)(?: almost)? like|remind\w*|resembl\w+|represent\w*|symboli\w+|invit\w+|suggest\w*|keep(?:s|ing)? the|"
     r"draw(?:s|ing) the|hint\w* at|could be read|so the|which (?:gives|adds|makes|creates|suits|fits|lends|keeps)|"
     r"emphasi\w+|enhanc\w+|captur(?:es|ing) the|stand(?:s|ing)? out|typical of|waiting for|one can almost|reflect\w*|blend\w* (?:in|of)"),
    ("skip", "", r"what (?:appears?|seems?|looks?) (?:to be|like)|(?:seems?|appears?|said|thought) to(?: be)?|it (?:seems|appears)(?: that)?|(?:might|could|may) be|"
     r"or so it seems|if i am not mistaken|some (?:sort|kind) of|made (?:out )?of|a bit|at the same height as|not only|in (?:this|the) \w+ we (?:can )?see"),
)


class _Token(NamedTuple):
    kind: str
    value: str
    start: int
    end: int


class _Noun(NamedTuple):
    kinds: frozenset[str]
    name: str  # the kind, the category or the word itself
    is_plural: bool
    exact: bool  # whether it names one kind


@functools.cache
def _phrases() -> re.Pattern[str]:
    patterns = (rf"(?P<p{i}>{pattern})" for i, (_, _, pattern) in enumerate(_PHRASES[2:], 2))
    marks = "|".join(rf"(?P<p{i}>{_PHRASES[i][2]})" for i in (0, 1))
    return re.compile(rf"{marks}|(?:{'|'.join(patterns)})(?![\w'’-])|(?P<word>[a-z0-9]+(?:[-'’]{{1,2}}[a-z0-9]+)*'?)")


def _plural(name: str) -> str:
    irregular = {one: many for many, one in _IRREGULAR.items()}
    if name in irregular or plural(name) != name + "s":
        return irregular.get(name, plural(name))
    if re.search(r"(?:s|x|ch|sh)$", name):
        return name + "es"
    return re.sub(r"(?<=[^aeiou])y$", "ie", name) + "s"


@functools.cache
def _nouns() -> dict[str, _Noun]:
    nouns: dict[str, _Noun] = {}

    def add(name: str, kinds: frozenset[str], means: str, exact: bool) -> None:
        for text, is_plural in ((_plural(name), True), (name, False)):
            nouns.setdefault(text, _Noun(kinds, means, is_plural and text != name, exact))
            nouns.setdefault(text.replace("-", " "), nouns[text])

    names = [(kind, name) for kind in (*EMOJI_KINDS, *SHAPE_KINDS) for name in names_of(kind)]
    names += [(kind, n) for kind, more in re.findall(r"(\w+):([^;\n]+)", _MORE_NAMES) for n in more.split(",")]
    for kind, name in names:
        add(name, frozenset({kind}), kind, True)
    for name, kinds in ({c: frozenset(k) for c, k in CATEGORIES.items() if c != "thing"} | _HYPERNYMS).items():
        add(name, kinds, name, False)
    return nouns


@functools.cache
def _classes() -> dict[str, str]:
    """Class of each word that is not the name of a thing."""
    classes = {word: kind for kind, words in _WORDS.items() for word in words.split()}
    for kind in ("background", "picture", "measure", "general", "part", "abstract"):
        classes |= {_plural(word): kind for word in _WORDS[kind].split() if _plural(word) not in classes}
    for verb in _ACTIONS:
        stem, last = verb.removesuffix("e"), verb[-1]
        double = verb + last if re.fullmatch(r".*[^aeiou][aeiou][bdgmnpt]", verb) else stem
        for form in (_plural(verb), f"{double}ing", f"{stem}ing", f"{double}ed", f"{stem}ed"):
            classes.setdefault(form, "action")
        classes.setdefault(verb, "base")
    classes |= dict.fromkeys("worn held ridden driven grown eaten stuck hidden drawn made broken curled seated".split(), "action")
    return classes


# --- The reader ------------------------------------------------------------------------------------------------------

_NOUN_LIKE = frozenset("noun word background picture hue measure general part abstract".split())
_PHRASE_WORDS = _NOUN_LIKE | frozenset("det number ordinal size colour adjective".split())
_Sides = tuple[str, ...]
"""What words mean: `("main",)`, `("second",)`, both, `("background",)`, or `()`, a thing that the scene does not show."""
_BACKGROUND: _Sides = ("background",)


class _Relation(NamedTuple):
    value: str
    start: int
    negated: int | None  # where a negation of it begins
    subject: _Sides | None  # None: said before its subject, "below it there is a cake"
    object: _Sides | None = None
    end: int = 0


def _tokens(text: str) -> list[_Token]:
    tokens = []
    for match in _phrases().finditer(text):
        start, end = match.span()
        if match.lastgroup != "word":
            kind, value, _ = _PHRASES[int(str(match.lastgroup)[1:])]
            tokens.append(_Token(kind, value or match.group(), start, end))
            continue
        word = match.group().rstrip("'")
        last = word.rpartition("-")[2]
        kind, value = "word", word
        if word in _nouns():
            kind = "noun"
        elif word in _SHADES or last in _SHADES:
            kind, value = "colour", _SHADES.get(word) or _SHADES[last]
        elif word in _SIZES:
            kind, value = "size", _SIZES[word]
        elif word in _NUMBERS:
            kind, value = "number", str(_NUMBERS[word])
        elif word in _ORDINALS:
            kind = "ordinal"
        elif word in _classes():
            kind = _classes()[word]
        elif word.endswith(("'s", "’s")):
            kind = "adjective"
        elif word.endswith("ly"):
            kind = "skip"
        tokens.append(_Token(kind, value, start, end))
    return [*tokens, _Token("stop", "", len(text), len(text))]


class FreeReader:
    """Reads a caption from left to right; `right`, `wrong` and `undecided` are its claims by `(attribute, value)`."""

    def __init__(self, caption: str, facts: Facts) -> None:
        self.caption, self.facts = caption, facts
        self.right: dict[tuple[str, str], Claim] = {}
        self.wrong: dict[tuple[str, str], Claim] = {}
        self.undecided: dict[tuple[str, str], Claim] = {}
        self.unknown: list[str] = []
        self.kinds = {side: kind for side, kind in (("main", facts.kind), ("second", facts.second)) if kind}
        self.mentions: list[tuple[_Sides, bool]] = []  # what was spoken of, and whether as a plural
        self.subject: _Sides | None = None  # what predicates are about
        self.last: _Sides | None = None  # the latest noun phrase
        self.phrase: list[_Token] = []  # the noun phrase that is being read
        self.role = ""  # how it is joined to what came before: "", "object", or a preposition
        self.relation: _Relation | None = None
        self.position: _Token | None = None  # said before its subject
        self.negation: int | None = None  # where it begins
        self.copula = self.begun = False  # after "is"; after the first noun phrase of a clause
        self.plain_of = -1  # where "of" begins a place, "at the top of a hill"
        self.scenery: int | None = None  # start of "the mood", "the picture", which may begin a flourish
        # Lower case letter by letter, because that of one letter may have two.
        text = "".join(small if len(small := letter.lower()) == 1 else letter for letter in caption).replace("’", "'")
        self.tokens = _tokens(text)
        flourish: int | None = None
        for at, token in enumerate(self.tokens):
            if flourish is None and token.kind != "stop":
                flourish = self._take(at, token)
            elif flourish is None or self._ends_flourish(at):
                if flourish is not None:
                    self._claim("other", "", flourish, token.start, None)
                    flourish = None
                self._take(at, token)
            elif token.kind in ("weather", "time"):
                self._setting(token)

    def _ends_flourish(self, at: int) -> bool:
        token, following = self.tokens[at], self.tokens[min(at + 1, len(self.tokens) - 1)]
        if token.kind == "conj":
            return token.value in ("but", "while") or following.value in ("the", "it", "they", "there")
        return token.kind == "stop" or (token.kind == "comma" and following.kind in ("conj", "rel"))

    def _claim(self, attribute: str, value: str, start: int, end: int, truth: bool | None) -> None:
        """Record a claim; a negation before it negates it."""
        text = self.caption[start:end]
        if self.negation is not None and truth is not None and attribute != "object":
            attribute, truth, text = f"no {attribute}", not truth, self.caption[self.negation : end]
        claims = self.undecided if truth is None else self.right if truth else self.wrong
        claims.setdefault((attribute, value or text.lower()), Claim(attribute, value, text.strip()))

    # --- Tokens

    def _take(self, at: int, token: _Token) -> int | None:
        """Read one token; the place where a flourish begins."""
        kind, value = token.kind, token.value
        following = self.tokens[min(at + 1, len(self.tokens) - 1)]
        before = self.tokens[at - 1].kind if at else "stop"
        has_noun = any(t.kind in _NOUN_LIKE for t in self.phrase)
        if kind in ("word", "base") and (before == "modal" or (kind == "base" and self.tokens[at - 1].value == "to")):
            kind = "action"
        elif kind == "base":
            kind = "word" if self.phrase and not (has_noun and self.phrase[-1].value.endswith("s")) else "action"
        if kind == "word":
            after_plural = has_noun and self.phrase[-1].kind != "word" and self.phrase[-1].value.endswith("s")
            verb_form = value.endswith(("ing", "ed")) and value not in _NOUNS_IN_ING and (has_noun or not self.phrase)
            if verb_form or after_plural or (has_noun and following.kind in ("det", "pron", "number") and value.endswith("s")):
                kind = "action"
        if kind == "word" and not self.phrase and before in ("weather", "time"):
            kind = "action"
        inside = bool(self.phrase) and not has_noun
        if kind == "action" and inside:
            kind = "adjective" if following.kind in _PHRASE_WORDS else "word"  # "a sleeping dog", "a park"
        elif value == "look" and self.phrase and self.phrase[0].value in ("a", "an", "the"):
            kind = "abstract"
        elif value == "leaves" and has_noun:
            kind = "action"
        if kind in _PHRASE_WORDS or (kind in ("pattern", "orientation") and following.kind in _NOUN_LIKE | {"colour", "size"}):
            if kind == "det" and has_noun:
                self._end_phrase(at)
            self.phrase.append(token._replace(kind=kind))
            return None
        guessed = bool(self.phrase) and not any(t.kind in _NOUN_LIKE - {"word"} for t in self.phrase)
        if kind == "skip" and guessed and following.kind in _PHRASE_WORDS - {"det"}:
            return None
        if inside and (kind in ("skip", "orientation", "pattern") or (kind in ("comma", "conj") and before in ("colour", "pattern", "size") and not self.copula)):
            if kind in ("orientation", "pattern"):
                self.phrase.append(token)
            return None
        if inside and kind in ("weather", "time"):
            self._setting(token)
            return None
        if value == "of" and self.phrase and self.phrase[-1].kind == "measure":
            return None  # "three slices of cake" are about cake
        scenery, self.scenery = self.scenery, None
        self._end_phrase(at)
        scenery = self.scenery if self.scenery is not None else scenery
        self.scenery = None
        if kind == "flourish" or (scenery is not None and kind in ("be", "action", "place", "skip") and before != "comma"):
            if kind == "flourish" or value not in _SHOWING:
                return token.start if scenery is None else scenery
        self.copula = kind == "be" or (self.copula and kind in ("skip", "conj", "neg", "pattern", "orientation"))
        if kind == "stop":
            self.relation = self.position = self.negation = None
            self.begun, self.role = False, ""
        elif kind in ("comma", "conj"):
            if value not in ("or", "nor"):
                self.negation = None
            self.role = self.role if kind == "conj" and self.role == "object" else ""
        elif kind == "neg":
            self.negation = token.start
            if value == "nobody":
                self._absence("person", token.start, token.end, True)
                self.negation = None
        elif kind == "pron":
            self._pronoun(token)
        elif kind == "rel":
            self.subject = self.last
        elif kind == "prep":
            if value == "on" and self.begun:
                self._relate(token, "above", before)
            elif value != "of" and (self.relation is None or self.relation.value != "undecided"):
                self.relation = None
            self.role = "" if at == self.plain_of else value
        elif kind == "relation":
            self._relate(token, value, before)
        elif kind == "position":
            self._place(at, token)
        elif kind in ("orientation", "pattern", "posture"):
            near = before in _PHRASE_WORDS or before == "rel"
            self._about(kind, value, (self.last if near else self.subject) if kind != "pattern" else _BACKGROUND, token)
        elif kind in ("weather", "time", "alone", "row"):
            self._setting(token)
            self.relation = None
        elif kind == "action":
            self.negation = None
            if self.subject:
                self._claim("attribute", "", token.start, token.end, None)
            self.relation = _Relation("undecided", token.start, None, self.subject) if self.begun else None
            self.role = "object"
        elif kind in ("place", "show"):
            self.role = ""
        return None

    def _setting(self, token: _Token) -> None:
        kind, value, facts = token.kind, token.value, self.facts
        truth: bool | None
        if kind == "time":
            truth = (facts.time == "night") == (value == "night")
        elif kind == "row":
            truth = facts.count > 1 or facts.relation in ("left of", "right of")
        elif kind == "alone":
            truth = not facts.second and (facts.count == 1 or bool(self.mentions and self.mentions[-1][1]))
        elif value == "sun":
            truth = False if facts.weather or facts.time else None
        else:
            value = value if value in ("rain", "snow", "any") else ""
            truth = bool(facts.weather) if value == "any" else facts.weather == value
        self._claim(kind, value if kind in ("weather", "time") else "", token.start, token.end, truth)

    def _pronoun(self, token: _Token) -> None:
        several = token.value in ("they", "them", "themselves")
        agreeing = [sides for sides, is_plural in self.mentions if is_plural == several]
        sides = agreeing[-1] if agreeing else self.subject or ()
        if self.subject in agreeing and self.relation is None and self.subject is not None:
            sides = self.subject
        if not self._join(sides, token.end):
            self.subject = sides
        self.last, self.begun = sides, True

    # --- Places

    def _relate(self, token: _Token, value: str, before: str) -> None:
        words = self.caption[token.start : token.end].lower()
        subject = self.subject if before in ("comma", "conj", "stop") or not self.last else self.last
        relation = _Relation(value, token.start, self.negation, subject if self.begun else None)
        self.negation = None
        if value in ("left of", "right of") and not words.endswith("of"):
            if self.relation is not None and self.relation.subject is None:  # "beside them on the right there is"
                self.relation = self.relation._replace(value=value)
                return
            if re.search(r"\b(?:its|their)\b", words):
                several = "their" in words
                owner = [sides for sides, is_plural in self.mentions if is_plural == several and sides != subject]
                relation = relation._replace(object=owner[-1] if owner else (), end=token.end)
            elif subject and len(subject) == 1 and len(self.kinds) == 2 and self._names_both():
                relation = relation._replace(object=tuple(side for side in self.kinds if side not in subject), end=token.end)
            elif subject:
                self._claim("column", "", token.start, token.end, None)
                return
            if relation.subject is not None and relation.object is not None:
                self._judge(relation)
                return
        self.relation, self.role = relation, "relation"

    def _names_both(self) -> bool:
        named = [noun.kinds for token in self.tokens if token.kind == "noun" for noun in (_nouns()[token.value],)]
        return all(any(kind in kinds for kinds in named) for kind in self.kinds.values())

    def _join(self, sides: _Sides, end: int) -> bool:
        """Give a noun phrase to the relation that waits for it; whether it is its object."""
        relation = self.relation
        if relation is None or sides == _BACKGROUND:
            return False
        if relation.object is not None:  # the subject comes last
            self._judge(relation._replace(subject=sides))
            self.relation = None
            return False
        if relation.subject is None:
            self.relation = relation._replace(object=sides, end=end)
        elif sides == relation.subject:  # "a bell, and right of it a cake"
            self.relation = relation._replace(subject=None, object=sides, end=end)
        else:
            self._judge(relation._replace(object=sides, end=end))
            self.relation = relation if not sides else None  # "left of a lamp and a dog"
        return True

    def _judge(self, relation: _Relation) -> None:
        subject, other = relation.subject, relation.object
        if not subject or not other or {*subject, *other} != {"main", "second"} or len(subject) + len(other) > 2:
            return
        kept, self.negation = self.negation, relation.negated
        span = (relation.start, relation.end)
        truth, value = self.facts.relation, relation.value
        if value == "undecided":
            self._claim("interaction", "", *span, None)
        elif value in ("beside", "near"):
            self._claim("side", value, *span, value == "near" or truth in ("left of", "right of"))
        elif subject == ("second",):
            truth = OPPOSITES[truth]
            self._claim("relation", OPPOSITES[value] if value == truth else value, *span, value == truth)
        else:
            self._claim("relation", value, *span, value == truth)
        self.negation = kept

    def _place(self, at: int, token: _Token) -> None:
        """The row of the subject; "at the top of a hill" is no row of the picture."""
        after = self.tokens[at + 1 : at + 6]
        if after[0].value == "of":
            of = next((t.kind for t in after[1:] if t.kind in _NOUN_LIKE), "picture")
            if of not in ("picture", "background", "general", "abstract"):
                self.plain_of = at + 1
                return
        if not self.begun:
            self.position = token
            return
        self._row(token, self.subject if self.subject is not None else self.last)

    def _row(self, token: _Token, sides: _Sides | None) -> None:
        if not sides or sides == _BACKGROUND:
            return
        row = POSITIONS.index(self.facts.position)
        rows = {"main": row, "second": row + ROWS_TO_SECOND.get(self.facts.relation, 0)}
        self._claim("position", token.value, token.start, token.end, all(POSITIONS[rows[s]] == token.value for s in sides))

    # --- Noun phrases

    def _about(self, kind: str, value: str, sides: _Sides | None, token: _Token) -> None:
        """An adjective, judged of what it belongs to."""
        facts, span = self.facts, (token.start, token.end)
        if sides == _BACKGROUND or (sides is None and kind == "colour"):
            if kind == "colour":
                value = "yellow" if value == "golden" else value
                self._claim("background", value, *span, value == facts.background)
            elif kind == "pattern":
                self._claim("pattern", value, *span, value == (facts.pattern or "plain"))
            return
        if not sides:
            return
        truth: bool | None = None
        attribute = "attribute"
        if kind in ("size", "orientation", "colour"):
            truths = [self._is(kind, value, side) for side in sides]
            truth = None if None in truths else all(truths)
            attribute = kind if "main" in sides else f"second_{kind}" if kind == "colour" else f"second {kind}"
            if kind == "colour" and truth and not all((facts.colour if s == "main" else facts.second_colour) for s in sides):
                attribute = f"natural {attribute}"
        elif kind in ("word", "adjective"):
            self.unknown.append(value)
        self._claim(attribute, value if truth is not None else "", *span, truth)

    def _is(self, kind: str, value: str, side: str) -> bool | None:
        facts = self.facts
        if kind == "size":
            return value == facts.size
        if kind == "orientation":
            return value == (facts.orientation if side == "main" else "upright")
        painted = facts.colour if side == "main" else facts.second_colour
        natural = NATURAL_COLOURS.get(self.kinds[side])
        if painted or natural:
            return value == (painted or natural)
        return False if value in _PAINTED else None  # nobody says which brown a dog has

    def _end_phrase(self, at: int) -> None:
        """Read the noun phrase that ends before a token."""
        phrase, self.phrase = self.phrase, []
        role, self.role = self.role, ""
        if not phrase:
            self.role = role
            return
        bare = phrase[0].kind != "det"
        heads = [
            i for i, t in enumerate(phrase) if t.kind in _NOUN_LIKE and not (t.kind == "word" and self.copula and bare)
        ]
        if heads and phrase[-1].kind == "colour" and phrase[heads[-1]].kind == "word":
            phrase, heads = phrase[-1:], []  # "in grass green"
        if not heads:
            self._predicate(phrase, at, role)
            return
        head = heads[-1]
        modifiers = [t for i, t in enumerate(phrase) if i != head and t.kind != "det"]
        kind, end = phrase[head].kind, phrase[head].end
        start = next(t.start for t in phrase if t.kind != "det")
        if kind == "background":
            for t in modifiers:
                self._about(t.kind, t.value, _BACKGROUND, t)
            if not role:
                self.subject = _BACKGROUND
                self.begun = True
        elif kind == "hue":
            ahead = self.tokens[at : at + 8]
            stop = next((i for i, t in enumerate(ahead) if t.kind in ("stop", "comma", "rel")), len(ahead))
            sides = _BACKGROUND if any(t.kind == "background" for t in ahead[:stop]) else self.subject
            for t in modifiers:
                if t.kind == "colour":
                    self._about("colour", t.value, sides, t)
        elif kind in ("picture", "abstract", "measure", "general"):
            self.scenery = phrase[0].start if kind in ("picture", "abstract") and role in ("", "relation") and not self.begun else None
            if kind == "general" and self.negation is not None:
                self._absence("thing", start, end, not self._unmentioned(frozenset(self.kinds.values())))
            elif kind == "general" and not role and phrase[head].value.endswith("s"):
                self.subject = tuple(self.kinds)  # "both objects"
        elif kind == "part":
            if self.subject and self.negation is None:
                self._about("part", "", self.subject, _Token("part", "", start, end))
        else:
            self._thing(phrase, head, modifiers, start, end, role, at)
        if self.tokens[at].value not in ("or", "nor"):
            self.negation = None

    def _predicate(self, phrase: list[_Token], at: int, role: str) -> None:
        """Adjectives without a noun: "is red", "two of them"."""
        for token in phrase:
            if token.kind == "number":
                partial = self.tokens[at].value == "of" and self.tokens[min(at + 2, len(self.tokens) - 1)].kind not in ("stop", "comma", "conj")
                if self.subject and not partial and not (token.value == "1" and bool(role)):
                    self._count(token.value, self.subject, token.start, token.end)
            elif token.kind != "det":
                self._about(token.kind, token.value, self.subject, token)
        self.role = role if all(t.kind == "det" for t in phrase) else ""

    def _count(self, value: str, sides: _Sides, start: int, end: int) -> None:
        count = sum(self.facts.count if side == "main" else 1 for side in sides if side != "background")
        truth = count > 2 if value == "some" else count > 1 if value == "plural" else count == int(value)
        exact = value.isdigit() and len(sides) == 1
        self._claim(("count" if sides == ("main",) else "second count") if exact else "plural", value, start, end, truth)

    def _unmentioned(self, kinds: frozenset[str]) -> list[str]:
        return [side for side, kind in self.kinds.items() if kind in kinds and not any(side in m for m, _ in self.mentions)]

    def _absence(self, name: str, start: int, end: int, truth: bool) -> None:
        kept, start, self.negation = self.negation, start if self.negation is None else self.negation, None
        self._claim("absence", name, start, end, truth)
        self.negation = kept

    def _thing(
        self, phrase: list[_Token], head: int, modifiers: list[_Token], start: int, end: int, role: str, at: int
    ) -> None:
        token = phrase[head]
        noun, first = _nouns().get(token.value), head
        for n in (3, 2):  # "palm tree", "jack o lantern"
            name = " ".join(t.value for t in phrase[max(head + 1 - n, 0) : head + 1])
            if name in _nouns() and head + 1 >= n:
                noun, first = _nouns()[name], head + 1 - n
                modifiers = [t for t in modifiers if t not in phrase[first:head]]
                break
        kinds = noun.kinds if noun is not None else frozenset()
        is_plural = noun.is_plural if noun is not None else token.value.endswith("s") and not token.value.endswith("ss")
        sides: _Sides = tuple(side for side, kind in self.kinds.items() if kind in kinds)
        if self.negation is not None:
            if noun is None and len(phrase) == 1 and self.caption[self.negation :].lower().startswith("not"):
                return  # "has not risen"
            said = [t for t in modifiers if t.kind in ("colour", "size", "orientation")]
            there = [side for side in sides if all(self._is(t.kind, t.value, side) is not False for t in said)]
            if "other" in self.caption[self.negation : end].lower().split():
                there = self._unmentioned(kinds)
            self._absence(token.value, start, end, not there)
            return
        number = next((t for t in modifiers if t.kind == "number"), None)
        ordinal = next((t for t in phrase if t.kind == "ordinal"), None)
        several = is_plural or (number is not None and number.value != "1")
        if len(sides) == 2:
            total = self.facts.count + 1
            if number is None or number.value != str(total):
                ahead = next((t for t in self.tokens[at:] if t.kind == "noun"), None)
                next_main = ahead is not None and _nouns()[ahead.value].kinds == {self.facts.kind}
                sides = ("second",) if next_main and not several else ("main",)
        indefinite = phrase[0].value in ("a", "an")
        same = self.relation is not None and self.relation.subject == sides and self.relation.object is None
        if ordinal is not None and sides == ("main",) and any("main" in m for m, _ in self.mentions):
            self._claim("count", ordinal.value, phrase[0].start, end, self.facts.count >= _ORDINALS[ordinal.value])
        elif sides and same and indefinite:
            sides = ()  # "an umbrella on top of a striped umbrella"
        if not sides:
            self._absent(token, start, end, role, noun, at)
        else:
            new = not any(set(sides) <= set(m) for m, _ in self.mentions)
            if new:
                side = "kind" if "main" in sides else "second"
                exact = noun is not None and noun.exact
                attribute = side if exact else f"category of {side}"
                self._claim(attribute, noun.name if noun else "", phrase[first].start, end, True)
            for t in modifiers:
                if t.kind not in ("number", "ordinal", "measure", "background", "picture", "abstract", "hue", "general"):
                    self._about("word" if t.kind in ("noun", "part") else t.kind, t.value, sides, t)
            if number is not None:
                self._count(number.value, sides, number.start, number.end)
            elif is_plural and new:
                self._count("plural", sides, token.start, end)
        if self.position is not None:
            self._row(self.position, sides)
            self.position = None
        is_object = self._join(sides, end)
        self.mentions.append((sides, several))
        self.last = sides
        if not is_object and role in ("", "with", "of") and (role == "" or self.subject is None):
            self.subject = sides
        self.begun = True

    def _absent(self, token: _Token, start: int, end: int, role: str, noun: _Noun | None, at: int) -> None:
        """A thing that is not there is one wrong claim, with all that is said of it; "of coffee" belongs to the cup."""
        if noun is None:
            self.unknown.append(token.value)
            bare = start == token.start and self.tokens[max(at - 2, 0)].kind not in ("det", "show") and not token.value.endswith("s") and token.value not in _IRREGULAR
            if bare and not role and start > 0:
                return  # an adjective or verb rather than a thing
            if _ABSTRACT_ENDING.fullmatch(token.value):
                return
        if role == "of" and self.last is not None and noun is None:
            if self.last:
                self._claim("attribute", "", start, end, None)
            return
        self._claim("object", token.value, start, end, False)
