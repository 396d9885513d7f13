"""The papers' runs that a run of the embedded world stands for, and how it differs from them, by hand.

A run is a preset, or a preset and one of its variants. The values of the papers are those of values_of_the_papers.py.
"""

# A tiny model decodes greedily.
GREEDY = {"beams": 1}
# SMILE in small: the vision tower is frozen. Maximum likelihood smooths no labels.
FROZEN = GREEDY | {"frozen_tower": True}
SMILE_KEYS = ("mle_weight", "first_token", "subset", "smoothing", "simplify", "fresh", "beams", "frozen_tower")
SMILE_KEYS += ("num_random", "curves", "selected", "frames")
SLE_KEYS = (
    "alpha",
    "samples",
    "entropy",
    "diversity",
    "distance",
    "baseline",
    "loss_type",
    "eos",
    "beams",
    "frozen_tower",
)

# DiscriTune in small: greedy captions, the running mean, no penalties and the whole text decoder, as in the paper.
DISCRITUNE = GREEDY
# No Detail Left Behind in small: samples at temperature 1, the mean of the batch as baseline, PEFT's LoRA and penalties.
SAMPLED = {"temperature": 1.0, "baseline": "batch_mean", "repetition": 1.0, "truncation": 1.0}
NDLB = GREEDY | SAMPLED | {"lora_init": "peft"}
WITH_CIDER = NDLB | {"baseline": "greedy"}
CURRICULUM = {"bags": {1: 2, 2: 3, 3: 5, 4: 7}}  # 4 epochs instead of 20
WHOLE = {"tune": None, "lora_init": "peft"}  # no LoRA
RL_KEYS = ("reward", "loss_type", "scope", "hard", "bank", "bank_size", "bags", "do_sample", "temperature", "baseline")
RL_KEYS += ("retrieval", "cider", "scale", "tune", "rank", "lora_alpha", "lora_init", "frozen_tower", "train_column")
RL_KEYS += ("repetition", "truncation", "train_beams", "beams", "curves", "selected")


def _ndlb(name, paper, differs=NDLB, variant=None):
    return {(f"ndlb/scenes/{name}", variant): (paper, differs)}


IN_SMALL = {
    ("smile_blip/scenes", None): ("smile_blip/coco", FROZEN),
    ("smile_blip/scenes_mle", None): ("smile/mle/coco", FROZEN | {"smoothing": 0.0}),
    ("smile/scenes/table4-none", None): ("smile/table4/none", FROZEN),
    ("smile/scenes/table4-shifting", None): ("smile/table4/shifting", FROZEN),
    ("smile/scenes/table5", None): ("smile/table5/lambda-0.05", FROZEN),
    ("smile/scenes/figure4a-caption", None): ("smile/figure4a/smile", FROZEN),
    ("smile/scenes/figure4a-random", None): ("smile/figure4a/random", FROZEN),
    ("smile/scenes/figure4a-one-random", None): ("smile/figure4a/one-random", FROZEN),
    ("smile/scenes/figure4a-reverse", None): ("smile/figure4a/reverse", FROZEN),
    # The new decoder learns by maximum likelihood in the same run.
    ("smile/scenes/table3-from-scratch", None): ("smile/table3/row2", FROZEN | {"fresh": True}),
    ("smile/scenes/simpler-mle", None): ("smile/mle/simpler-coco", FROZEN | {"smoothing": 0.0}),
    ("smile/scenes/simpler-smile", None): ("smile/figure4b/simpler-smile", FROZEN),
    ("smile/scenes/simplest-mle", None): ("smile/mle/simplest-coco", FROZEN | {"smoothing": 0.0}),
    ("smile/scenes/simplest-smile", None): ("smile/figure4b/simplest-smile", FROZEN),
    ("smile_video/moving_scenes", None): ("smile_video/msrvtt", FROZEN | {"frames": 4}),
    ("smile/scenes/video-curves", None): (
        "smile_video/msrvtt",
        FROZEN | {"frames": 4, "curves": True, "selected": False},
    ),
    # The starts of No Detail Left Behind.
    ("smile/scenes/holistic", None): ("ndlb/table11/holisticcap", FROZEN),
    ("smile/scenes/blend", None): ("ndlb/table11/blendcap", FROZEN),
    ("sle_blip/scenes", None): ("sle/table2/sle-0.75", GREEDY | {"alpha": 0.6}),
    ("sle/scenes/frontier", None): ("sle/table2/sle-0.75", GREEDY | {"alpha": 0.6}),
    ("sle/scenes/curves", None): ("sle/table2/sle-0.75", GREEDY | {"alpha": 0.6}),
    ("discritune/scenes/tables", None): ("discritune/coco", DISCRITUNE),
    ("discritune/scenes/tables", "no baseline"): ("discritune/table8/none", DISCRITUNE),
    ("discritune/scenes/tables", "greedy baseline, beams"): ("discritune/table8/greedy", DISCRITUNE),
    ("discritune/scenes/tables", "accuracy"): ("discritune/table9/accuracy", DISCRITUNE),
    ("discritune/scenes/tables", "cosine"): ("discritune/table9/cosine", DISCRITUNE),
    ("discritune/scenes/tables", "5 hard"): ("discritune/table12/coco-5-hard", DISCRITUNE),
    ("discritune/scenes/tables", "10 hard"): ("discritune/table12/coco-10-hard", DISCRITUNE),
    ("discritune/scenes/tables", "sampled"): ("discritune/coco", DISCRITUNE | {"do_sample": True}),
    ("discritune/scenes/tables", "sampled, no baseline"): ("discritune/table8/none", DISCRITUNE | {"do_sample": True}),
    **{
        (f"self_retrieval_{model}/scenes", variant): (paper, NDLB | WHOLE | differs)
        for model in ("blip", "clipcap")
        for variant, paper, differs in (
            (None, "ndlb/table5/row2", CURRICULUM),
            ("SR (random)", "ndlb/table3/row4", {}),
        )
    },
    **_ndlb("generic-l", "ndlb/table5/row2", NDLB | CURRICULUM),
    **_ndlb("generic-l", "ndlb/table3/row4", variant="SR"),
    **_ndlb("generic-l", "ndlb/table7/row3", WITH_CIDER, "CIDEr"),
    **_ndlb("generic-v", "ndlb/table5/row3", NDLB | CURRICULUM),
    **_ndlb("generic-v", "ndlb/table4/row2", variant="SR"),
    **_ndlb("generic-lv", "ndlb/table5/row4", NDLB | CURRICULUM),
    **_ndlb("generic-lv", "ndlb/table4/row3", variant="SR"),
    **_ndlb("generic-lv", "ndlb/table7/row5", WITH_CIDER | CURRICULUM, "CIDEr 0.5"),
    **_ndlb("blend-l", "ndlb/table3/row5"),
    **_ndlb("blend-v", "ndlb/table4/row5"),
    **_ndlb("blend-lv", "ndlb/table6/blendcap", NDLB | CURRICULUM),
    **_ndlb("blend-lv", "ndlb/table4/row6", variant="SR"),
    # Tables 7, 10 and 13 have HolisticCap alone.
    **_ndlb("blend-lv", "ndlb/table10/row5", NDLB | {"train_column": "blend_caption"}, "bags of 7"),
    **_ndlb("blend-lv", "ndlb/table7/row10", WITH_CIDER | CURRICULUM | {"train_column": "blend_caption"}, "CIDEr 0.5"),
    **_ndlb("blend-lv", "ndlb/table13/row6", WITH_CIDER | CURRICULUM | {"train_column": "blend_caption"}, "CIDEr 1"),
    **_ndlb("holistic-l", "ndlb/table5/row6", NDLB | CURRICULUM),
    **_ndlb("holistic-l", "ndlb/table3/row6", variant="SR"),
    **_ndlb("holistic-l", "ndlb/table7/row8", WITH_CIDER, "CIDEr"),
    **_ndlb("holistic-v", "ndlb/table5/row7", NDLB | CURRICULUM),
    **_ndlb("holistic-v", "ndlb/table4/row8", variant="SR"),
    **_ndlb("holistic-lv", "ndlb/table5/row8", NDLB | CURRICULUM),
    **_ndlb("holistic-lv", "ndlb/table4/row9", variant="SR"),
    **{
        place: value
        for row, size in ((2, 2), (3, 3), (4, 5), (5, 7), (6, 10))
        for place, value in _ndlb("holistic-lv", f"ndlb/table10/row{row}", NDLB, f"bags of {size}").items()
    },
    **{
        place: value
        for row, weight in ((2, "0.1"), (3, "0.3"), (4, "0.5"), (5, "0.7"), (6, "1"))
        for place, value in _ndlb(
            "holistic-lv", f"ndlb/table13/row{row}", WITH_CIDER | CURRICULUM, f"CIDEr {weight}"
        ).items()
    },
    **_ndlb("holistic-large-bags", "ndlb/table10/row8"),
    **_ndlb("holistic-large-bags", "ndlb/table10/row7", NDLB, "bags of 15"),
    # The paper's model family and initial LoRA; the same with PEFT's.
    **_ndlb("clipcap-l", "ndlb/table3/row4", GREEDY | SAMPLED),
    **_ndlb("clipcap-l", "ndlb/table3/row4", GREEDY | SAMPLED, "rate 1e-5"),
    **_ndlb("clipcap-l", "ndlb/table3/row4", GREEDY | SAMPLED, "rate 1e-4"),
    **_ndlb("clipcap-v", "ndlb/table4/row2", GREEDY | SAMPLED),
    **_ndlb("clipcap-v", "ndlb/table4/row2", GREEDY | SAMPLED, "rate 1e-5"),
    **_ndlb("clipcap-v", "ndlb/table4/row2", GREEDY | SAMPLED, "rate 1e-4"),
    **_ndlb("clipcap-l-peft", "ndlb/table3/row4"),
    **_ndlb("clipcap-l-peft", "ndlb/table3/row4", variant="rate 1e-4"),
    **_ndlb("clipcap-l-peft", "ndlb/table3/row4", variant="rate 1e-3"),
    **_ndlb("table14-generic", "ndlb/table14/coco"),
    **_ndlb("table14-blend", "ndlb/table14/blendcap"),
    **_ndlb("table14-holistic", "ndlb/table14/holisticcap"),
}
# Evaluations of other data, shipped captioners, and how rewards are hacked: they stand for no training of a paper.
OF_NO_PAPER = {"discritune/scenes/to-alt-text", "discritune/scenes/to-shapes", "smile/scenes/lora", "ndlb/scenes/lora"}
OF_NO_PAPER |= {"discritune/scenes/clipcap-to-alt-text", "discritune/scenes/clipcap-to-shapes"}
OF_NO_PAPER |= {
    "ndlb/scenes/hacking",
    "ndlb/scenes/hacking-kinds",
    "ndlb/scenes/hacking-diversity",
    "ndlb/scenes/tipping",
}
OF_NO_PAPER |= {"mle_clipcap/scenes", "scorer/scenes"}
