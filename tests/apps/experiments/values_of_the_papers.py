"""The papers' values of every preset, written by hand from the papers and the authors' configurations.

Nothing here is read from recipes/configs. "code" marks a value of the authors' code where the paper states none, "ours" one that
neither states.
"""

FINETUNED, PRETRAINED = "outputs/blip-coco-finetuned", "outputs/blip-pretrained"

# --- DiscriTune and No Detail Left Behind ---

SCORERS = {"scorer": "openai/clip-vit-base-patch32", "judge": "openai/clip-vit-large-patch14"}  # the judge is ours
# code: the mean over the tokens of a caption, then over captions; no paper penalises.
CODE = {"loss_type": "grpo", "repetition": 0.0, "truncation": 0.0}
COCO, FLICKR = "dataset_coco.json", "dataset_flickr30k.json"
BOOSTED = "outputs/boosted/train/captions.parquet"
TEST_REFERENCES = "outputs/boosted/test/captions.parquet"


# Columns of the tables: P@1 by CLIP ViT-B/32 (Tables 1, 4, 8, 9, 13) and similarity to references (Tables 2, 3, 5, 12).
P1, NLG = {"reward_blocks_recall_at_1"}, {"bleu_4", "meteor", "cider_d", "spice"}

# DiscriTune, section 4.1: Adam, 1e-7, constant, 100 images, greedy captions of 40 positions, 5 beams; code: no weight decay.
DISCRITUNE = {"recipe": "self_retrieval_clipcap", "start": "outputs/clipcap-coco", "data": COCO, "tune": None}
DISCRITUNE |= {"rate": 1e-7, "schedule": "constant", "decay": 0.0, "batch": 100, "epochs": 20, "frozen_tower": True}
DISCRITUNE |= {"do_sample": False, "baseline": "running_mean", "reward": "log_prob"}
DISCRITUNE |= {"bags": None, "longest": 30, "beams": 5, "train_longest": 30, "cider": 0.0}
DISCRITUNE |= {"scope": "batch", "scale": "model", "paper": "discritune", "measures": P1 | NLG, **SCORERS, **CODE}
# Table 12 ranks among the k nearest and 99 - k random images of each target.
HARD = {"scope": "bank", "bank": "nearest_and_random", "bank_size": 99, "bank_batch": 100}
# Flickr30K for 10 epochs; the tables show its validation images.
ABLATION = DISCRITUNE | {"data": FLICKR, "epochs": 10, "table_split": "validation"}
EVALUATION = {"recipe": "self_retrieval_clipcap", "start": "outputs/clipcap-coco", "data": COCO, "epochs": 0}
EVALUATION |= {"beams": 5, "longest": 30, "paper": "discritune", "measures": P1 | NLG, "table_split": "test"} | SCORERS
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
NDLB = {"recipe": "self_retrieval_clipcap", "start": "outputs/ndlb/table11/coco/model", "data": COCO, "rate": 9e-8}
NDLB |= {"schedule": "constant", "decay": 0.01, "batch": 100, "steps": 23000, "tune": "language", "rank": 32}
NDLB |= {"lora_alpha": 16, "dropout": 0.0, "lora_init": "paper", "frozen_tower": True, "do_sample": True}
NDLB |= {"temperature": 0.3, "baseline": "running_mean", "bags": None, "retrieval": 1.0, "cider": 0.0, "longest": 40}
NDLB |= {"train_longest": 40, "beams": 5, "scope": "batch", "reward": "log_prob", "paper": "ndlb", **SCORERS, **CODE}
NDLB |= {"truematch": "truematch", "train_captions": None, "test_references": None, "measures": NDLB_COLUMNS}
NDLB_MLE = {"recipe": "self_retrieval_clipcap", "start": "outputs/ndlb/table11/coco/model", "data": COCO}
NDLB_MLE |= {"epochs": 0, "longest": 40, "beams": 5, "paper": "ndlb", "truematch": "truematch"}
NDLB_MLE |= {"scorer": SCORERS["scorer"]}
NDLB_MLE |= {"test_references": None, "measures": NDLB_COLUMNS}
REFERENCES = {"train_captions": BOOSTED, "test_references": TEST_REFERENCES}
BLEND_TEXTS = REFERENCES | dict.fromkeys(("train_column", "test_column"), "blend_caption")
HOLISTIC_TEXTS = REFERENCES | dict.fromkeys(("train_column", "test_column"), "captions")
BLEND = {"start": "outputs/ndlb/table11/blendcap/model", **BLEND_TEXTS, "measures": AGAINST_BOOSTED}
HOLISTIC = {"start": "outputs/ndlb/table11/holisticcap/model", **HOLISTIC_TEXTS, "measures": AGAINST_BOOSTED}
TESTED = ("start", "test_references", "test_column", "measures")  # of an evaluation
V = {"tune": "vision", "frozen_tower": False}
LV = {"tune": "both", "frozen_tower": False}
CURRICULUM = {"bags": "paper"}
TOWERS = ({}, V, LV)
CIDER = {"cider": 1.0, "retrieval": 0.0, "baseline": "greedy"}
BOTH = {"cider": 0.5, "baseline": "greedy", "rate": 1e-7}
# Table 11; the vision tower is frozen.
CLIPCAP = {"recipe": "mle_clipcap", "start": "", "vision": "openai/clip-vit-base-patch32"}
CLIPCAP |= {"gpt": "openai-community/gpt2", "data": COCO, "batch": 40}
CLIPCAP |= {"captions": "all"}  # code: configs/mle_final.yml, 8 images with 5 captions
CLIPCAP |= {"rate": 2e-5, "schedule": "linear", "steps": 30000, "warmup": 1000, "prefix_length": 10}
CLIPCAP |= {"frozen_tower": True, "mle_weight": 1.0, "beams": 5, "longest": 30, "measures": {"cider_d"}}
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
    **{
        f"ndlb/table4/row{3 * texts + tower + 1}": NDLB | start | tuned
        for texts, start in enumerate(({}, BLEND, HOLISTIC))
        for tower, tuned in enumerate(TOWERS)
    },
    "ndlb/table5/row1": NDLB,
    "ndlb/table5/row5": NDLB | HOLISTIC,
    **{f"ndlb/table5/row{row}": NDLB | tuned | CURRICULUM for row, tuned in enumerate(TOWERS, 2)},
    **{f"ndlb/table5/row{row}": NDLB | HOLISTIC | tuned | CURRICULUM for row, tuned in enumerate(TOWERS, 6)},
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
    # Appendix B, Algorithm 1: the mean of the texts is not normalised before it is concatenated.
    "ndlb/code/concatenated": NDLB | HOLISTIC | LV | CURRICULUM | {"features": "concatenated"},
    **{
        f"ndlb/table10/row{row}": NDLB | HOLISTIC | LV | {"bags": size}
        for row, size in enumerate((None, 2, 3, 5, 7, 10, 15, 20, "paper"), 1)
    },
    "ndlb/table13/row1": NDLB | HOLISTIC | LV | CURRICULUM,
    **{
        f"ndlb/table13/row{row}": NDLB | HOLISTIC | LV | CURRICULUM | BOTH | {"cider": weight}
        for row, weight in enumerate((0.1, 0.3, 0.5, 0.7, 1.0), 2)
    },
    "mle_clipcap/coco": CLIPCAP,
    "ndlb/table11/coco": NDLB_CLIPCAP,
    # Training captions of up to 50 tokens: ours.
    "ndlb/table11/blendcap": NDLB_CLIPCAP | BLEND_TEXTS | {"longest_reference": 50},
    "ndlb/table11/holisticcap": NDLB_CLIPCAP | HOLISTIC_TEXTS | {"longest_reference": 50},
}

# --- SMILE and SLE ---

# Table 1: length, words, R@1 and R@5 in the hard pool, CLIPScore, perplexity.
SMILE_COLUMNS = {"length", "lexical_diversity", "pool_recall_at_1", "pool_recall_at_5", "clip_score", "perplexity"}

# SMILE, section 3.1; code: BLIP/configs/caption_coco.yaml. 32 captions on each of four GPUs.
SMILE = {"recipe": "smile_blip", "start": FINETUNED, "data": COCO, "prompt": "a picture of ", "mle_weight": 0.0}
SMILE |= {"rate": 1e-5, "schedule": "cosine", "decay": 0.05, "batch": 4 * 32, "epochs": 5}
SMILE |= {"captions": "all"}  # code: data/coco_karpathy_dataset.py of BLIP has a row per caption
SMILE |= {"frozen_tower": False, "beams": 3, "longest": 75, "longest_reference": 40, "subset": "caption"}
SMILE |= {"smoothing": 0.0, "pool": "capenrich_hard_pool.json", "prefix": None, "judge": None}
SMILE |= {"measures": SMILE_COLUMNS}
# The authors' checkpoints, untouched: without the pool, and with the papers' scorer alone.
RELEASED = SMILE | {"epochs": 0, "pool": None, "measures": {"length", "lexical_diversity", "clip_score"}}
ONE_SCORER = SCORERS | {"judge": SCORERS["scorer"]}
# Figure 4(a) shows curves of unselected checkpoints.
UNSELECTED = {"curves": True, "selected": False}
# BLIP's finetuning with maximum likelihood smooths labels with 0.1 (code).
MLE = SMILE | {"start": PRETRAINED, "mle_weight": 1.0, "smoothing": 0.1}
# SMILE, Table 6: MSR-VTT and BLIP4video, which is not published. The paper states no settings of this training: those from the frames
# on are ours, and from the rate on as on images.
VIDEO = {"recipe": "smile_video", "start": FINETUNED, "data": "msr-vtt", "mle_weight": 0.0}
VIDEO |= {"frames": 8, "mle_epochs": 2, "longest": 40, "prompt": "a video of ", "frozen_tower": True}
VIDEO |= {"rate": 1e-5, "mle_rate": 1e-5, "schedule": "cosine", "decay": 0.05, "batch": 32, "epochs": 5, "beams": 3}
VIDEO |= {"longest_reference": 40}
# Table 6: EMScore's precision, recall and F, and R@1 and R@5 by F.
VIDEO |= {"measures": {"length", "lexical_diversity", "perplexity", "emscore", "emscore_precision", "emscore_recall"}}
VIDEO["measures"] |= {"emscore_recall_at_1", "emscore_recall_at_5"}
# SMILE, Appendix B: LLaMA-13B on Alpaca, batch 8, 5 to 20 epochs; its learning rate and rank are not stated.
LLAMA = {"recipe": "smile_llama_lora", "start": "huggyllama/llama-13b", "data": "tatsu-lab/alpaca", "batch": 8}
LLAMA |= {"rate": 1e-4, "rank": 8, "lora_alpha": 16, "lora_targets": ["q_proj", "v_proj"]}  # ours
LLAMA |= {"mle_weight": 0.0, "controls": [1.0]}  # the objectives of the table: MLE and SMILE
# Table 7: length, words, seven categories, overall.
LLAMA |= {"measures": {"length", "lexical_diversity", "generic", "knowledge", "roleplay", "common-sense", "fermi"}}
LLAMA["measures"] |= {"counterfactual", "writing", "overall"}
# ours: a current small LLaMA.
LLAMA_1B = LLAMA | {"start": "meta-llama/Llama-3.2-1B", "epochs": 5, "rate": 2e-4, "rank": 16, "lora_alpha": 32}
LLAMA_1B |= {"lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}

# SLE, section 5.1: 5 samples, alpha 0.75; the paper names no rate, batch or epochs, so these are ours, for BLIP.
SLE = {
    "recipe": "sle_blip",
    "start": PRETRAINED,
    "data": COCO,
    "paper": "sle",
    "alpha": 0.75,
    "samples": 5,
    "beams": 5,
}
SLE |= {"entropy": 0.0, "diversity": "pairwise", "distance": "bleu34", "baseline": "greedy", "loss_type": "dapo"}
SLE |= {"eos": True, "xe_epochs": 5, "epochs": 15, "batch": 20, "rate": 1e-6, "xe_rate": 1e-5}
SLE |= {"longest": 75, "train_longest": 40, "decay": 0.0}  # ours
SLE |= {"frozen_tower": True}  # section 5.1: features are not finetuned
# Tables 2 and 3, and Tables 1 and 4: five samples (rs) and the beam's five captions (bs).
SLE |= {"measures": {f"{by}_{k}" for by in ("rs", "bs") for k in ("cider_d", "div_1", "div_2", "mbleu_4_per_image")}}
SLE["measures"] |= {"meteor", "cider_d", "spice"}
# Number of frames and prompt are ours.
TGIF = SLE | {"data": "tgif", "frames": 8, "prompt": "a video of "}

PAPERS = {
    "smile_blip/coco": SMILE,
    "smile/mle/coco": MLE,
    "smile/mle/flickr30k": MLE | {"data": FLICKR, "pool": None},
    "smile/mle/from-scratch": MLE | {"fresh": True},
    "smile/mle/simpler-coco": MLE | {"start": FINETUNED, "simplify": "simpler"},
    "smile/mle/simplest-coco": MLE | {"start": FINETUNED, "simplify": "simplest"},
    "smile/table1/flickr30k": SMILE | {"start": "outputs/smile/mle/flickr30k/model", "data": FLICKR, "pool": None},
    "smile/table3/row1": SMILE | {"start": "outputs/smile/mle/from-scratch/model", "epochs": 0},
    "smile/table3/row2": SMILE | {"start": "outputs/smile/mle/from-scratch/model"},
    "smile/table3/row3": SMILE | {"start": PRETRAINED, "epochs": 0},
    "smile/table3/row4": SMILE | {"start": PRETRAINED},
    "smile/table3/row5": SMILE | {"epochs": 0},
    "smile/table3/row6": SMILE | {"mle_weight": 1.0},
    "smile/table3/row7": SMILE,
    "smile/table4/default": SMILE | {"first_token": "mle"},
    "smile/table4/none": SMILE | {"first_token": "smile"},
    "smile/table4/shifting": SMILE | {"first_token": "shift"},
    "smile/table5/lambda-1": SMILE | {"epochs": 0},
    **{f"smile/table5/lambda-{weight}": SMILE | {"mle_weight": weight} for weight in (0.5, 0.1, 0.05, 0.01, 0)},
    "smile/figure4a/smile": SMILE | UNSELECTED,
    "smile/figure4a/random": SMILE | UNSELECTED | {"subset": "random", "first_token": "smile", "num_random": 10},
    # Not in the paper: the least that a subset of words can add.
    "smile/figure4a/one-random": SMILE | UNSELECTED | {"subset": "random", "first_token": "smile", "num_random": 1},
    "smile/figure4a/reverse": SMILE | UNSELECTED | {"subset": "reverse"},
    **{
        f"smile/figure4b/{simple}-{name}": SMILE
        | {"start": f"outputs/smile/mle/{simple}-coco/model", "simplify": simple, "mle_weight": weight}
        for simple in ("simpler", "simplest")
        for name, weight in (("mle", 1.0), ("smile", 0.0))
    },
    "smile_video/msrvtt": VIDEO,
    "smile/table6/tgif": VIDEO | {"data": "tgif", "frames": 4},  # ours: the paper has MSR-VTT alone
    "smile_llama_lora/alpaca": LLAMA | {"epochs": 5},
    **{f"smile/table7/{epochs}-epochs": LLAMA | {"epochs": epochs} for epochs in (5, 10, 20)},
    "smile/llama-1b/document": LLAMA_1B,
    "smile/llama-1b/sentence": LLAMA_1B | {"subset_scope": "sentence"},
    "smile/llama-1b/window": LLAMA_1B | {"subset_scope": "window"},
    "released/blip": RELEASED | ONE_SCORER,
    **{
        f"released/{name}": RELEASED | ONE_SCORER | {"start": f"outputs/blip-{name}"}
        for name in ("smile", "mle-smile")
    },
    "released/clipcap": EVALUATION | ONE_SCORER | {"measures": {"blocks_recall_at_1", *NLG}},
    "released/truematch": EVALUATION
    | ONE_SCORER
    | {
        "paper": "ndlb",
        "truematch": "truematch",
        "longest": 40,
        "measures": {f"bag_{k}_recall_at_1" for k in (3, 5, 7)},
    },
    **SELF_RETRIEVAL,
    "sle_blip/coco": SLE,
    "sle/table1/xe": SLE | {"epochs": 5},
    "sle/table1/sll": SLE | {"alpha": 1.0},
    **{f"sle/table2/sll-me-{weight}": SLE | {"alpha": 1.0, "entropy": weight} for weight in (0.1, 0.01, 0.001)},
    **{f"sle/table2/sle-{alpha}": SLE | {"alpha": alpha} for alpha in (0.25, 0.5, 0.75)},
    "sle/table3/sll": TGIF | {"alpha": 1.0},
    "sle/table3/sll-me": TGIF | {"alpha": 1.0, "entropy": 0.01},
    "sle/table3/sle": TGIF,
    # code: gen_model/vevd.py (1e-4, batch 32), gen_model/diversity.py (1e-5), expr/prepare_gen_cfg.py (32, 30 steps, 0.25).
    "sle/code-2018": SLE
    | {"diversity": "multi_reference", "batch": 32, "rate": 1e-5, "xe_rate": 1e-4, "train_longest": 30},
}
