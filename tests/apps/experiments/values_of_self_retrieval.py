"""The values of DiscriTune and No Detail Left Behind, written by hand; values_of_the_papers.py says how."""

FINETUNED = "outputs/blip-coco-finetuned"
CLIP = "openai/clip-vit-base-patch32"
COCO, FLICKR = "dataset_coco.json", "dataset_flickr30k.json"
BOOSTED = "outputs/boosted/train/captions.parquet"
TEST_REFERENCES = "outputs/boosted/test/captions.parquet"


# Columns of the tables: P@1 by CLIP ViT-B/32 (Tables 1, 4, 8, 9, 13) and similarity to references (Tables 2, 3, 5, 12).
P1, NLG = {"reward_blocks_recall_at_1"}, {"bleu_4", "meteor", "cider_d", "spice"}

# DiscriTune, section 4.1: Adam, 1e-7, constant, 100 images, greedy captions of 40 positions, 5 beams; code: no weight decay.
DISCRITUNE = {
    "recipe": "self_retrieval_clipcap",
    "start": "outputs/clipcap-coco",
    "data": COCO,
    "tune": None,
    "rate": 1e-7,
    "schedule": "constant",
    "decay": 0.0,
    "batch": 100,
    "epochs": 20,
    "frozen_tower": True,
    "do_sample": False,
    "baseline": "running_mean",
    "reward": "log_prob",
    "loss_type": "grpo",  # code: the mean over the tokens of a caption, then over captions
    "repetition": 0.0,  # no paper penalises
    "truncation": 0.0,
    "bags": None,
    "longest": 30,
    "beams": 5,
    "train_longest": 30,
    "cider": 0.0,
    "scope": "batch",
    "scale": "model",
    "paper": "discritune",
    "scorer": CLIP,
    "judge": "openai/clip-vit-large-patch14",  # ours
    "measures": P1 | NLG,
}
# Table 12 ranks among the k nearest and 99 - k random images of each target.
HARD = {"scope": "bank", "bank": "nearest_and_random", "bank_size": 99, "bank_batch": 100, "bank_weighting": "equal"}
# Flickr30K for 10 epochs; the tables show its validation images.
ABLATION = DISCRITUNE | {"data": FLICKR, "epochs": 10, "table_split": "validation"}
EVALUATION = {
    "recipe": "self_retrieval_clipcap",
    "start": "outputs/clipcap-coco",
    "data": COCO,
    "epochs": 0,
    "beams": 5,
    "longest": 30,
    "paper": "discritune",
    "scorer": CLIP,
    "judge": "openai/clip-vit-large-patch14",  # ours
    "measures": P1 | NLG,
    "table_split": "test",
}
# The data of Tables 1, 3 and 5, and the captioners of Tables 1 and 3 with their starts.
CONCEPTUAL = {"data": "imagefolder", "folder": "conceptual_captions"}
NOCAPS, CONCADIA = {"data": "nocaps", "folder": "nocaps"}, {"data": "concadia", "folder": "concadia"}
OTHER_DATA = {
    "nocaps-near": NOCAPS | {"table_split": "near_domain"},
    "nocaps-out": NOCAPS | {"table_split": "out_domain"},
    "concadia-captions": CONCADIA | {"references": "captions"},
    "concadia-descriptions": CONCADIA | {"references": "description"},
}
ON_COCO = {"clipcap-coco": "outputs/clipcap-coco", "discritune-coco": "outputs/discritune/coco/model"}
ON_CONCEPTUAL = {
    "clipcap-conceptual": "outputs/clipcap-conceptual",
    "discritune-conceptual": "outputs/discritune/conceptual/model",
}
# BLIP: one epoch, text decoder alone; 40 positions, of which the prompt takes 4.
OF_BLIP = {"recipe": "self_retrieval_blip", "start": FINETUNED, "longest": 36, "prompt": "a picture of "}

# Tables 3 to 7: BLEU-4, CIDEr, R@1 among 100 and in bags, ClipSc, and words that occur five times.
NDLB_COLUMNS = {"bleu_4", "cider_d", "reward_rd100_recall_at_1", "reward_ndlb_clip_score", "vocabulary_size"}
NDLB_COLUMNS |= {f"reward_bag_{size}_recall_at_1" for size in (3, 5, 7)}
AGAINST_BOOSTED = NDLB_COLUMNS | {"more_cider_d"}  # CIDEr against BlendCap or HolisticCap

# No Detail Left Behind, Table 12 and Appendix C.3; code: finetuning/lora.py, configs/sr_final.yml (temperature, lengths).
NDLB = {
    "recipe": "self_retrieval_clipcap",
    "start": "outputs/ndlb/table11/coco/model",
    "data": COCO,
    "rate": 9e-8,
    "schedule": "constant",
    "decay": 0.01,
    "batch": 100,
    "steps": 23000,
    "tune": "language",
    "rank": 32,
    "lora_alpha": 16,
    "lora_init": "paper",
    "frozen_tower": True,
    "do_sample": True,
    "temperature": 0.3,
    "baseline": "running_mean",
    "bags": None,
    "retrieval": 1.0,
    "cider": 0.0,
    "train_longest": 40,
    "longest": 40,
    "beams": 5,
    "scope": "batch",
    "reward": "log_prob",
    "loss_type": "grpo",  # code: the mean over the tokens of a caption, then over captions
    "repetition": 0.0,  # no paper penalises
    "truncation": 0.0,
    "paper": "ndlb",
    "scorer": CLIP,
    "judge": "openai/clip-vit-large-patch14",  # ours
    "truematch": "truematch",
    "train_captions": None,
    "test_references": None,
    "measures": NDLB_COLUMNS,
}
NDLB_MLE = {
    "recipe": "self_retrieval_clipcap",
    "start": "outputs/ndlb/table11/coco/model",
    "data": COCO,
    "epochs": 0,
    "longest": 40,
    "beams": 5,
    "paper": "ndlb",
    "scorer": CLIP,
    "truematch": "truematch",
    "test_references": None,
    "measures": NDLB_COLUMNS,
}
BLEND = {
    "start": "outputs/ndlb/table11/blendcap/model",
    "train_captions": BOOSTED,
    "train_column": "blend_caption",
    "test_references": TEST_REFERENCES,
    "test_column": "blend_caption",
    "measures": AGAINST_BOOSTED,
}
HOLISTIC = {
    "start": "outputs/ndlb/table11/holisticcap/model",
    "train_captions": BOOSTED,
    "train_column": "captions",
    "test_references": TEST_REFERENCES,
    "test_column": "captions",
    "measures": AGAINST_BOOSTED,
}
TESTED = ("start", "test_references", "test_column", "measures")  # of an evaluation
V = {"tune": "vision", "frozen_tower": False}
LV = {"tune": "both", "frozen_tower": False}
CURRICULUM = {"bags": "paper"}
CIDER = {"cider": 1.0, "retrieval": 0.0, "baseline": "greedy"}
BOTH = {"cider": 0.5, "baseline": "greedy", "rate": 1e-7}
# Table 11; the vision tower is frozen.
CLIPCAP = {
    "recipe": "mle_clipcap",
    "start": "",
    "vision": "openai/clip-vit-base-patch32",
    "gpt": "openai-community/gpt2",
    "data": COCO,
    "batch": 40,
    "captions": "all",  # code: configs/mle_final.yml, 8 images with 5 captions
    "rate": 2e-5,
    "schedule": "linear",
    "steps": 30000,
    "warmup": 1000,
    "prefix_length": 10,
    "frozen_tower": True,
    "mle_weight": 1.0,
    "beams": 5,
    "longest": 30,
    "measures": {"cider_d"},
}
NDLB_CLIPCAP = CLIPCAP | {"paper": "ndlb", "truematch": "truematch", "longest": 40, "decay": 0.01}
NDLB_CLIPCAP |= {"measures": {"bleu_4", "cider_d", "vocabulary_size"}}

SELF_RETRIEVAL = {
    "self_retrieval_clipcap/discritune": DISCRITUNE,
    "self_retrieval_clipcap/evaluation": EVALUATION,
    "discritune/coco": DISCRITUNE,
    "discritune/conceptual": DISCRITUNE | CONCEPTUAL | {"start": "outputs/clipcap-conceptual", "epochs": 2},
    "discritune/mle-conceptual": CLIPCAP | CONCEPTUAL,
    **{
        f"discritune/table1/{data}-{name}": EVALUATION | settings | {"start": start}
        for data, settings in {"coco": {}, "flickr": {"data": FLICKR}, **OTHER_DATA}.items()
        for name, start in {**(ON_COCO if data in OTHER_DATA else {}), **ON_CONCEPTUAL}.items()
    },
    **{
        f"discritune/table4/{data}-{name}": EVALUATION | OF_BLIP | settings | {"start": start}
        for data, settings in {"flickr": {"data": FLICKR}, **OTHER_DATA}.items()
        for name, start in {"blip": FINETUNED, "discritune": "outputs/discritune/blip/model"}.items()
    },
    "discritune/table8/none": ABLATION | {"baseline": "none"},
    "discritune/table8/greedy": ABLATION | {"baseline": "greedy", "train_beams": 5},
    "discritune/table8/running-mean": ABLATION,
    "discritune/table9/cosine": ABLATION | {"reward": "cosine"},
    "discritune/table9/accuracy": ABLATION | {"reward": "accuracy"},
    "discritune/table9/log-prob": ABLATION,
    # Appendix D.2: trained with 5 or 10 hard distractors of 99, tested with random ones.
    "discritune/table12/coco-clipcap": EVALUATION,
    "discritune/table12/coco-discritune": DISCRITUNE,
    "discritune/table12/coco-5-hard": DISCRITUNE | HARD | {"hard": 5},
    "discritune/table12/coco-10-hard": DISCRITUNE | HARD | {"hard": 10},
    **{
        f"discritune/table12/{data}-{row}": EVALUATION | settings | ({} if start is None else {"start": start})
        for data, settings in (("conceptual", CONCEPTUAL), ("flickr", {"data": FLICKR}))
        for row, start in (
            ("clipcap", None),
            ("discritune", "outputs/discritune/coco/model"),
            ("5-hard", "outputs/discritune/table12/coco-5-hard/model"),
            ("10-hard", "outputs/discritune/table12/coco-10-hard/model"),
        )
    },
    **dict.fromkeys(
        ("self_retrieval_blip/coco", "discritune/blip"), DISCRITUNE | OF_BLIP | {"epochs": 1, "train_longest": 36}
    ),
    "self_retrieval_clipcap/ndlb": NDLB,
    "ndlb/table3/row1": NDLB_MLE,
    "ndlb/table3/row2": NDLB_MLE | {k: BLEND[k] for k in TESTED},
    "ndlb/table3/row3": NDLB_MLE | {k: HOLISTIC[k] for k in TESTED},
    "ndlb/table3/row4": NDLB,
    "ndlb/table3/row5": NDLB | BLEND,
    "ndlb/table3/row6": NDLB | HOLISTIC,
    "ndlb/table4/row1": NDLB,
    "ndlb/table4/row2": NDLB | V,
    "ndlb/table4/row3": NDLB | LV,
    "ndlb/table4/row4": NDLB | BLEND,
    "ndlb/table4/row5": NDLB | BLEND | V,
    "ndlb/table4/row6": NDLB | BLEND | LV,
    "ndlb/table4/row7": NDLB | HOLISTIC,
    "ndlb/table4/row8": NDLB | HOLISTIC | V,
    "ndlb/table4/row9": NDLB | HOLISTIC | LV,
    "ndlb/table5/row1": NDLB,
    "ndlb/table5/row2": NDLB | CURRICULUM,
    "ndlb/table5/row3": NDLB | V | CURRICULUM,
    "ndlb/table5/row4": NDLB | LV | CURRICULUM,
    "ndlb/table5/row5": NDLB | HOLISTIC,
    "ndlb/table5/row6": NDLB | HOLISTIC | CURRICULUM,
    "ndlb/table5/row7": NDLB | HOLISTIC | V | CURRICULUM,
    "ndlb/table5/row8": NDLB | HOLISTIC | LV | CURRICULUM,
    "ndlb/table6/blendcap": NDLB | BLEND | LV | CURRICULUM,
    # 100 epochs, as in Figure 3: 113,287 images in batches of 100. Every point of the curve is a stopping point.
    **{
        f"ndlb/table14/{name}": NDLB | start | {"steps": 113300, "curves": True, "selected": False}
        for name, start in (("coco", {}), ("blendcap", BLEND), ("holisticcap", HOLISTIC))
    },
    "ndlb/table7/row1": NDLB_MLE,
    "ndlb/table7/row2": NDLB,
    "ndlb/table7/row3": NDLB | CIDER | {"rate": 1e-6, "frequencies": "train"},
    "ndlb/table7/row4": NDLB | LV | CURRICULUM,
    "ndlb/table7/row5": NDLB | LV | CURRICULUM | BOTH,
    "ndlb/table7/row6": NDLB_MLE | {k: HOLISTIC[k] for k in TESTED},
    "ndlb/table7/row7": NDLB | HOLISTIC,
    "ndlb/table7/row8": NDLB | HOLISTIC | CIDER | {"rate": 1e-7},
    "ndlb/table7/row9": NDLB | HOLISTIC | LV | CURRICULUM,
    "ndlb/table7/row10": NDLB | HOLISTIC | LV | CURRICULUM | BOTH,
    # code: finetuning/losses.py, CiderReward (PTB words without the full stop); configs/cider.yml, cider-sr.yml (baselines).
    "ndlb/code/cider": NDLB | CIDER | {"rate": 1e-6, "baseline": "running_mean", "frequencies": "batch", "eos": False},
    "ndlb/code/cider-sr": NDLB | LV | CURRICULUM | BOTH | {"frequencies": "batch", "eos": False},
    "ndlb/table10/row1": NDLB | HOLISTIC | LV,
    **{
        f"ndlb/table10/row{row}": NDLB | HOLISTIC | LV | {"bags": size}
        for row, size in ((2, 2), (3, 3), (4, 5), (5, 7), (6, 10), (7, 15), (8, 20), (9, "paper"))
    },
    "ndlb/table13/row1": NDLB | HOLISTIC | LV | CURRICULUM,
    **{
        f"ndlb/table13/row{row}": NDLB | HOLISTIC | LV | CURRICULUM | BOTH | {"cider": weight}
        for row, weight in ((2, 0.1), (3, 0.3), (4, 0.5), (5, 0.7), (6, 1.0))
    },
    "mle_clipcap/coco": CLIPCAP,
    "ndlb/table11/coco": NDLB_CLIPCAP,
    # Training captions of up to 50 tokens: ours.
    "ndlb/table11/blendcap": NDLB_CLIPCAP
    | {k: v for k, v in BLEND.items() if k not in ("start", "measures")}
    | {"longest_reference": 50},
    "ndlb/table11/holisticcap": NDLB_CLIPCAP
    | {k: v for k, v in HOLISTIC.items() if k not in ("start", "measures")}
    | {"longest_reference": 50},
}
