"""The papers' values of every preset, written by hand from the papers and the authors' configurations.

Nothing here is read from recipes/configs. "code" marks a value of the authors' code where the paper states none, "ours" one that
neither states. values_of_self_retrieval.py has the other two papers.
"""

from tests.apps.experiments.values_of_self_retrieval import COCO, FLICKR, SELF_RETRIEVAL

FINETUNED, PRETRAINED = "outputs/blip-coco-finetuned", "outputs/blip-pretrained"

# Table 1: length, words, R@1 and R@5 in the hard pool, CLIPScore, perplexity.
SMILE_COLUMNS = {"length", "lexical_diversity", "pool_recall_at_1", "pool_recall_at_5", "clip_score", "perplexity"}

# SMILE, section 3.1; code: BLIP/configs/caption_coco.yaml. 32 captions on each of four GPUs.
SMILE = {
    "recipe": "smile_blip",
    "start": FINETUNED,
    "data": COCO,
    "prompt": "a picture of ",
    "mle_weight": 0.0,
    "rate": 1e-5,
    "schedule": "cosine",
    "decay": 0.05,
    "batch": 4 * 32,
    "epochs": 5,
    "captions": "all",  # code: data/coco_karpathy_dataset.py of BLIP has a row per caption
    "frozen_tower": False,
    "beams": 3,
    "longest": 75,
    "longest_reference": 40,
    "subset": "caption",
    "smoothing": 0.0,
    "pool": "capenrich_hard_pool.json",
    "prefix": None,
    "judge": None,
    "measures": SMILE_COLUMNS,
}
# Figure 4(a) shows curves of unselected checkpoints.
UNSELECTED = {"curves": True, "selected": False}
# BLIP's finetuning with maximum likelihood smooths labels with 0.1 (code).
MLE = SMILE | {"start": PRETRAINED, "mle_weight": 1.0, "smoothing": 0.1}
# SMILE, Table 6: MSR-VTT and BLIP4video, which is not published. The paper states no settings of this training.
VIDEO = {
    "recipe": "smile_video",
    "start": FINETUNED,
    "data": "msr-vtt",
    "frames": 8,  # ours
    "mle_epochs": 2,  # ours
    "mle_weight": 0.0,
    "rate": 1e-5,  # ours, as on images
    "schedule": "cosine",  # ours, as on images
    "decay": 0.05,  # ours, as on images
    "batch": 32,  # ours, as on images
    "epochs": 5,  # ours, as on images
    "beams": 3,  # ours, as on images
    "longest": 40,  # ours
    "longest_reference": 40,  # ours, as on images
    "prompt": "a video of ",  # ours
    "mle_rate": 1e-5,  # ours, as on images
    "frozen_tower": True,  # ours
    # Table 6: EMScore's precision, recall and F, and R@1 and R@5 by F.
    "measures": {"length", "lexical_diversity", "perplexity", "emscore", "emscore_precision", "emscore_recall"}
    | {"emscore_recall_at_1", "emscore_recall_at_5"},
}
# SMILE, Appendix B: LLaMA-13B on Alpaca, batch 8, 5 to 20 epochs; its learning rate and rank are not stated.
LLAMA = {
    "recipe": "smile_llama_lora",
    "start": "huggyllama/llama-13b",
    "data": "tatsu-lab/alpaca",
    "batch": 8,
    "rate": 1e-4,  # ours
    "rank": 8,  # ours
    "lora_alpha": 16,  # ours
    "lora_targets": ["q_proj", "v_proj"],  # ours
    "controls": [1.0],  # the objectives of the table: MLE and SMILE
    "mle_weight": 0.0,
    # Table 7: length, words, seven categories, overall.
    "measures": {"length", "lexical_diversity", "generic", "knowledge", "roleplay", "common-sense", "fermi"}
    | {"counterfactual", "writing", "overall"},
}
# ours: a current small LLaMA.
LLAMA_1B = LLAMA | {"start": "meta-llama/Llama-3.2-1B", "epochs": 5, "rate": 2e-4, "rank": 16, "lora_alpha": 32}
LLAMA_1B |= {"lora_targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}

# SLE, section 5.1: 5 samples, alpha 0.75; the paper names no rate, batch or epochs, so these are ours, for BLIP.
SLE = {
    "recipe": "sle_blip",
    "start": PRETRAINED,
    "data": COCO,
    "alpha": 0.75,
    "samples": 5,
    "entropy": 0.0,
    "diversity": "pairwise",
    "distance": "bleu34",
    "baseline": "greedy",
    "loss_type": "dapo",
    "eos": True,
    "xe_epochs": 5,
    "epochs": 15,
    "batch": 20,
    "rate": 1e-6,
    "xe_rate": 1e-5,
    "beams": 5,
    "longest": 75,  # ours
    "train_longest": 40,  # ours
    "decay": 0.0,  # ours
    "frozen_tower": True,  # section 5.1: features are not finetuned
    "paper": "sle",
    # Tables 2 and 3, and Tables 1 and 4: five samples (rs) and the beam's five captions (bs).
    "measures": {"meteor", "cider_d", "spice"}
    | {f"{by}_{key}" for by in ("rs", "bs") for key in ("cider_d", "div_1", "div_2", "mbleu_4_per_image")},
}
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
    "smile/table5/lambda-0.5": SMILE | {"mle_weight": 0.5},
    "smile/table5/lambda-0.1": SMILE | {"mle_weight": 0.1},
    "smile/table5/lambda-0.05": SMILE | {"mle_weight": 0.05},
    "smile/table5/lambda-0.01": SMILE | {"mle_weight": 0.01},
    "smile/table5/lambda-0": SMILE,
    "smile/figure4a/smile": SMILE | UNSELECTED,
    "smile/figure4a/random": SMILE | UNSELECTED | {"subset": "random", "first_token": "smile", "num_random": 10},
    # Not in the paper: the least that a subset of words can add.
    "smile/figure4a/one-random": SMILE | UNSELECTED | {"subset": "random", "first_token": "smile", "num_random": 1},
    "smile/figure4a/reverse": SMILE | UNSELECTED | {"subset": "reverse"},
    "smile/figure4b/simpler-mle": SMILE
    | {"start": "outputs/smile/mle/simpler-coco/model", "simplify": "simpler", "mle_weight": 1.0},
    "smile/figure4b/simpler-smile": SMILE | {"start": "outputs/smile/mle/simpler-coco/model", "simplify": "simpler"},
    "smile/figure4b/simplest-mle": SMILE
    | {"start": "outputs/smile/mle/simplest-coco/model", "simplify": "simplest", "mle_weight": 1.0},
    "smile/figure4b/simplest-smile": SMILE
    | {"start": "outputs/smile/mle/simplest-coco/model", "simplify": "simplest"},
    "smile_video/msrvtt": VIDEO,
    "smile/table6/tgif": VIDEO | {"data": "tgif", "frames": 4},  # ours: the paper has MSR-VTT alone
    "smile_llama_lora/alpaca": LLAMA | {"epochs": 5},
    "smile/table7/5-epochs": LLAMA | {"epochs": 5},
    "smile/table7/10-epochs": LLAMA | {"epochs": 10},
    "smile/table7/20-epochs": LLAMA | {"epochs": 20},
    "smile/llama-1b/document": LLAMA_1B,
    "smile/llama-1b/sentence": LLAMA_1B | {"subset_scope": "sentence"},
    "smile/llama-1b/window": LLAMA_1B | {"subset_scope": "window"},
    **SELF_RETRIEVAL,
    "sle_blip/coco": SLE,
    "sle/table1/xe": SLE | {"epochs": 5},
    "sle/table1/sll": SLE | {"alpha": 1.0},
    "sle/table2/sll-me-0.1": SLE | {"alpha": 1.0, "entropy": 0.1},
    "sle/table2/sll-me-0.01": SLE | {"alpha": 1.0, "entropy": 0.01},
    "sle/table2/sll-me-0.001": SLE | {"alpha": 1.0, "entropy": 0.001},
    "sle/table2/sle-0.25": SLE | {"alpha": 0.25},
    "sle/table2/sle-0.5": SLE | {"alpha": 0.5},
    "sle/table2/sle-0.75": SLE,
    "sle/table3/sll": TGIF | {"alpha": 1.0},
    "sle/table3/sll-me": TGIF | {"alpha": 1.0, "entropy": 0.01},
    "sle/table3/sle": TGIF,
    # code: gen_model/vevd.py (1e-4, batch 32), gen_model/diversity.py (1e-5), expr/prepare_gen_cfg.py (32, 30 steps, 0.25).
    "sle/code-2018": SLE
    | {"diversity": "multi_reference", "batch": 32, "rate": 1e-5, "xe_rate": 1e-4, "train_longest": 30},
}
