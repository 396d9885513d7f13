"""The papers' runs that a run of the embedded world stands for, and how it differs from them, by hand.

A run is a preset, or a preset and one of its variants, one of each kind. The values of the papers are those of values_of_the_papers.py.
"""

# A tiny model decodes greedily.
GREEDY = {"beams": 1}
# SMILE in small: the vision tower is frozen. Maximum likelihood smooths no labels.
FROZEN = GREEDY | {"frozen_tower": True}
SMILE_KEYS = "mle_weight first_token subset smoothing simplify fresh beams frozen_tower num_random curves".split()
SMILE_KEYS += ["selected", "frames"]
SLE_KEYS = "alpha samples entropy diversity distance baseline loss_type eos beams frozen_tower".split()
# No Detail Left Behind in small: samples at temperature 1, the mean of the batch as baseline, PEFT's LoRA and penalties.
SAMPLED = {"temperature": 1.0, "baseline": "batch_mean", "repetition": 1.0, "truncation": 1.0}
NDLB = GREEDY | SAMPLED | {"lora_init": "peft"}
CIDER = {"baseline": "greedy"}
CURRICULUM = {"bags": {1: 2, 2: 3, 3: 5, 4: 7}}  # 4 epochs instead of 20
WHOLE = {"tune": None}  # no LoRA
BLEND = {"train_column": "blend_caption"}  # Tables 7, 10 and 13 have HolisticCap alone
RL_KEYS = (
    "reward loss_type scope hard bank bank_size bags do_sample temperature baseline retrieval cider scale".split()
)
RL_KEYS += "tune rank lora_alpha lora_init frozen_tower train_column repetition truncation train_beams".split()
RL_KEYS += ["beams", "curves", "selected"]

IN_SMALL = {
    ("smile_blip/scenes", None): ("smile_blip/coco", FROZEN),
    ("smile_blip/scenes_mle", None): ("smile/mle/coco", FROZEN | {"smoothing": 0.0}),
    ("smile/scenes/table4-shifting", None): ("smile/table4/shifting", FROZEN),
    ("smile/scenes/table5", None): ("smile/table5/lambda-0.05", FROZEN),
    ("smile/scenes/figure4a-random", None): ("smile/figure4a/random", FROZEN),
    ("smile/scenes/figure4a-reverse", None): ("smile/figure4a/reverse", FROZEN),
    # The new decoder learns by maximum likelihood in the same run.
    ("smile/scenes/table3-from-scratch", None): ("smile/table3/row2", FROZEN | {"fresh": True}),
    ("smile/scenes/simpler-smile", None): ("smile/figure4b/simpler-smile", FROZEN),
    ("smile_video/moving_scenes", None): ("smile_video/msrvtt", FROZEN | {"frames": 4}),
    ("smile/scenes/holistic", None): ("ndlb/table11/holisticcap", FROZEN),
    ("sle/scenes/frontier", None): ("sle/table2/sle-0.75", GREEDY | {"alpha": 0.6}),
    ("discritune/scenes/tables", None): ("discritune/coco", GREEDY),
    ("discritune/scenes/tables", "no baseline"): ("discritune/table8/none", GREEDY),
    ("discritune/scenes/tables", "greedy baseline, beams"): ("discritune/table8/greedy", GREEDY),
    ("discritune/scenes/tables", "cosine"): ("discritune/table9/cosine", GREEDY),
    ("discritune/scenes/tables", "5 hard"): ("discritune/table12/coco-5-hard", GREEDY),
    ("self_retrieval_blip/scenes", None): ("ndlb/table5/row2", NDLB | WHOLE | CURRICULUM),
    ("self_retrieval_clipcap/scenes", "SR (random)"): ("ndlb/table3/row4", NDLB | WHOLE),
    ("ndlb/scenes/generic-l", None): ("ndlb/table5/row2", NDLB | CURRICULUM),
    ("ndlb/scenes/generic-l", "CIDEr"): ("ndlb/table7/row3", NDLB | CIDER),
    ("ndlb/scenes/generic-v", "SR"): ("ndlb/table4/row2", NDLB),
    ("ndlb/scenes/blend-lv", None): ("ndlb/table6/blendcap", NDLB | CURRICULUM),
    ("ndlb/scenes/blend-lv", "CIDEr 0.5"): ("ndlb/table7/row10", NDLB | CIDER | CURRICULUM | BLEND),
    ("ndlb/scenes/holistic-lv", None): ("ndlb/table5/row8", NDLB | CURRICULUM),
    ("ndlb/scenes/holistic-lv", "bags of 5"): ("ndlb/table10/row4", NDLB),
    ("ndlb/scenes/holistic-large-bags", None): ("ndlb/table10/row8", NDLB),
    # The paper's model family and initial LoRA.
    ("ndlb/scenes/clipcap-l", None): ("ndlb/table3/row4", GREEDY | SAMPLED),
    ("ndlb/scenes/table14-generic", None): ("ndlb/table14/coco", NDLB),
}
