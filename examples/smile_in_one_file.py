"""SMILE in one file: BLIP learns from the words of each caption only, and its captions become longer and more specific.

Yue et al. 2023, "Learning Descriptive Image Captioning via Semipermeable Maximum Likelihood Estimation". Read it from top
to bottom. It runs on the embedded world, without a network, in seconds on a CPU core:

    python examples/smile_in_one_file.py

Maximum likelihood compares each word with the whole vocabulary, so a rare detail competes with every common word. SMILE compares
it with the other words of the same caption. `SmileTrainer` takes the same steps (tests/examples/test_one_file.py compares the
gradients), with any model family, several processes, evaluation, checkpoints and early stopping.

Shapes: B images, T tokens, V vocabulary, M image tokens, D features.
"""

import random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BertTokenizer, BlipForConditionalGeneration, BlipImageProcessor

from hf_captionrl import load_scenes, load_scorer
from hf_captionrl.losses import IGNORE_INDEX, smile_loss
from hf_captionrl.metrics import self_retrieval
from hf_captionrl.utils.model_files import model_path

# --- Settings: those of the paper (Section 3.1) are in brackets --------------------------------------------------------

MODEL = model_path("scenes:blip-mle")  # trained by maximum likelihood [BLIP-base, on COCO]
STEPS = 20  # SMILE is a dose: after some dozen steps captions have more wrong details [5 epochs of COCO]
BATCH_SIZE = 64  # [128]
LEARNING_RATE = 2e-4  # a tiny model wants a larger step [1e-5]
WEIGHT_DECAY = 0.05
MLE_WEIGHT = 0.0  # lambda of Eq. 4; with 1 this is maximum likelihood
MAX_TOKENS = 30
SEED = 0


# --- Model ---------------------------------------------------------------------------------------------------------------


def load(name):
    """BLIP, its tokenizer and its image processor. The vision tower is frozen, so that each image is encoded once."""
    model = BlipForConditionalGeneration.from_pretrained(name, use_safetensors=True)
    model.vision_model.requires_grad_(False)
    return model, BertTokenizer.from_pretrained(name), BlipImageProcessor.from_pretrained(name)


@torch.no_grad()
def encode_images(model, processor, images):
    """Output of the vision tower, to which every word attends."""
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]  # (B, 3, H, W)
    return model.vision_model(pixels).last_hidden_state  # (B, M, D)


def encode_captions(model, tokenizer, captions):
    """Token ids and labels: start token, words, end token. Padding and the start token are not supervised."""
    config = model.config.text_config
    words = tokenizer(captions, add_special_tokens=False)["input_ids"]
    rows = [torch.tensor([config.bos_token_id, *row, config.sep_token_id]) for row in words]
    ids = pad_sequence(rows, batch_first=True, padding_value=config.pad_token_id)  # (B, T)
    labels = pad_sequence(rows, batch_first=True, padding_value=IGNORE_INDEX)  # (B, T)
    labels[:, 0] = IGNORE_INDEX
    return ids, labels


# --- Loss ----------------------------------------------------------------------------------------------------------------


def loss_of(model, features, ids, labels):
    """Eq. 2-4, the mean over all words of the batch."""
    # The decoder is causal and padding is on the right, so no word sees it and no mask is needed.
    logits = model.text_decoder(input_ids=ids, encoder_hidden_states=features).logits  # (B, T, V)
    # Position t predicts word t + 1. Eq. 2: the softmax of a position runs over the words of its caption, a subset of V;
    # that of the first word over all of V (Section 3.3), because captions would otherwise begin anywhere.
    return smile_loss(logits[:, :-1], labels[:, 1:], mle_weight=MLE_WEIGHT)


# --- Captions, and what they are worth -----------------------------------------------------------------------------------


@torch.no_grad()
def write(model, tokenizer, features):
    """Greedy captions."""
    config = model.config.text_config
    start = torch.full((len(features), 1), config.bos_token_id)  # (B, 1)
    ids = model.text_decoder.generate(
        input_ids=start,
        encoder_hidden_states=features,
        eos_token_id=config.sep_token_id,
        pad_token_id=config.pad_token_id,
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
    )  # (B, T)
    return tokenizer.batch_decode(ids[:, 1:], skip_special_tokens=True)


def show(name, captions, scorer, images):
    """Length, and R@1: the share of captions from which a scorer that trained nothing finds the image among all."""
    found = self_retrieval(scorer.text_features(captions), images)
    words = sum(len(caption.split()) for caption in captions) / len(captions)
    low, high = found["recall_at_1_ci"]
    print(f"{name:6} R@1 {found['recall_at_1']:.2f} [{low:.2f}, {high:.2f}], {words:.1f} words: {captions[0]}")


# --- The loop ------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    random.seed(SEED)
    torch.manual_seed(SEED)
    model, tokenizer, processor = load(MODEL)
    data = load_scenes(num_train=1280, num_validation=0, num_test=300)
    train, test = (
        encode_images(model, processor, data[split]["image"][:]) for split in ("train", "test")
    )  # (N, M, D)
    references = data["train"]["captions"][:]  # five captions of each image

    scorer = load_scorer("scenes:siglip-held-out")
    images = scorer.image_features(data["test"]["image"][:])
    show("before", write(model, tokenizer, test), scorer, images)

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for step in range(STEPS):
        rows = random.sample(range(len(train)), BATCH_SIZE)
        captions = [random.choice(references[row]) for row in rows]  # one caption of each image
        ids, labels = encode_captions(model, tokenizer, captions)
        loss = loss_of(model, train[rows], ids, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step:3}  loss {loss:.3f}")

    show("after", write(model, tokenizer, test), scorer, images)
