"""SLE in one file: BLIP is rewarded for captions that match the references and differ from each other.

Chen and Jin 2020, "Better Captioning with Sequence-Level Exploration". Read it from top to bottom. It runs on the embedded world,
without a network, in half a minute on a CPU core:

    python examples/sle_in_one_file.py

CIDEr-D alone (`ALPHA = 1`) is self-critical training, after which the samples of an image are nearly one caption. The second reward
keeps them apart; this short run is too small to show it, docs/sle.md has the curve. `SLETrainer` takes the same steps
(tests/examples/test_one_file.py compares the gradients).

Shapes: B images, s captions of each, N = B * s, T tokens, V vocabulary, M image tokens, D features.
"""

import random

import torch
from transformers import BertTokenizer, BlipForConditionalGeneration, BlipImageProcessor

from hf_captionrl import load_scenes
from hf_captionrl.losses import policy_gradient_loss
from hf_captionrl.metrics import caption_diversity, cider_d
from hf_captionrl.rewards import bleu34_distance
from hf_captionrl.text.cider_d import CiderScorer, DocumentFrequencies
from hf_captionrl.text.ngrams import TokenBatch
from hf_captionrl.utils.model_files import model_path

# --- Settings: those of the paper (Section 5.1) are in brackets --------------------------------------------------------

MODEL = model_path("scenes:blip-mle")  # trained by maximum likelihood [cross-entropy comes first, Algorithm 1]
STEPS = 100
BATCH_SIZE = 20
SAMPLES = 5  # s [5]
ALPHA = 0.75  # weight of CIDEr-D in Eq. 8 [0.25, 0.5 or 0.75]
LEARNING_RATE = 1e-4  # a tiny model wants a larger step
MAX_TOKENS = 20
SEED = 0


# --- Model: captions, and their log-probabilities ------------------------------------------------------------------------


def load(name):
    """BLIP, its tokenizer and its image processor. The vision tower is frozen, so that each image is encoded once."""
    model = BlipForConditionalGeneration.from_pretrained(name, use_safetensors=True)
    model.vision_model.requires_grad_(False)
    return model, BertTokenizer.from_pretrained(name), BlipImageProcessor.from_pretrained(name)


@torch.no_grad()
def write(model, features, do_sample):
    """Captions of the policy itself (top_k=0: of the whole distribution): ids after the start token, and their mask."""
    config = model.config.text_config
    start = torch.full((len(features), 1), config.bos_token_id)
    ids = model.text_decoder.generate(
        input_ids=start,
        encoder_hidden_states=features,
        eos_token_id=config.sep_token_id,
        pad_token_id=config.pad_token_id,
        max_new_tokens=MAX_TOKENS,
        do_sample=do_sample,
        top_k=0 if do_sample else None,
    )[:, 1:]  # (N, T)
    return ids, ids != config.pad_token_id


def log_probs_of(model, features, ids):
    """Log-probability of each token of the captions under the policy."""
    start = torch.full((len(ids), 1), model.config.text_config.bos_token_id)
    inputs = torch.cat([start, ids[:, :-1]], dim=1)  # (N, T): position t predicts ids[:, t]
    logits = model.text_decoder(input_ids=inputs, encoder_hidden_states=features).logits  # (N, T, V)
    return logits.log_softmax(-1).gather(2, ids[:, :, None])[:, :, 0]  # (N, T)


# --- Rewards: CIDEr-D against the references, distances between siblings -------------------------------------------------


class Cider:
    """CIDEr-D of token ids, with the document frequencies of all training references; the end token counts as a word."""

    def __init__(self, references, tokenizer, end):
        encoded = [tokenizer(texts, add_special_tokens=False)["input_ids"] for texts in references]
        self.references = [[[*ids, end] for ids in captions] for captions in encoded]  # of each image
        batch, images = self.batch(range(len(references)))
        self.scorer = CiderScorer(DocumentFrequencies.from_token_batch(batch, images, eos=True))

    def batch(self, rows):
        """The references of some images, and the place of the image of each among `rows`."""
        captions = [caption for row in rows for caption in self.references[row]]
        images = [place for place, row in enumerate(rows) for _ in self.references[row]]
        tokens = torch.tensor([token for caption in captions for token in caption])
        return TokenBatch(tokens, torch.tensor([len(caption) for caption in captions])), torch.tensor(images)

    def __call__(self, ids, mask, rows):
        """CIDEr-D `(B, s)` of captions `(B * s, T)` of some images."""
        references, images = self.batch(rows)
        of = torch.arange(len(rows)).repeat_interleave(len(ids) // len(rows))  # (N,)
        batch = TokenBatch.from_ids(ids, mask).followed_by(references)
        return self.scorer.score_tokens(batch, of, images).view(len(rows), -1)


def loss_of(model, features, ids, mask, cider, greedy):
    """Eq. 16, with CIDEr-D `(B, s)` of the samples and `(B, 1)` of the greedy captions; `features` has a row per image."""
    end = model.config.text_config.sep_token_id
    distances = bleu34_distance(ids, mask & (ids != end), SAMPLES)  # (B, s, s) d(y_j, y_k), Section 4
    diversity = 2 / SAMPLES * distances.sum(2)  # (B, s), Eq. 14
    # Each reward has its own baseline: the greedy caption (self-critical), and the mean over the samples of the image.
    advantages = ALPHA * (cider - greedy) + (1 - ALPHA) * (diversity - diversity.mean(1, keepdim=True))  # (B, s)
    log_probs = log_probs_of(model, features.repeat_interleave(SAMPLES, dim=0), ids)  # (N, T)
    return policy_gradient_loss(log_probs, advantages.flatten(), mask, loss_type="dapo")["loss"]  # over all tokens


# --- The loop ------------------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    random.seed(SEED)
    torch.manual_seed(SEED)
    model, tokenizer, processor = load(MODEL)
    data = load_scenes(num_train=1280, num_validation=0, num_test=300)
    with torch.no_grad():
        splits = [processor(images=data[name]["image"][:], return_tensors="pt") for name in ("train", "test")]
        train, test = (model.vision_model(split["pixel_values"]).last_hidden_state for split in splits)  # (N, M, D)
    cider_of = Cider(data["train"]["captions"][:], tokenizer, model.config.text_config.sep_token_id)

    def show(name):
        """CIDEr-D of samples for the test images, and how much the five of an image repeat each other."""
        ids, _ = write(model, test.repeat_interleave(SAMPLES, dim=0), do_sample=True)
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        cider = cider_d(texts, [captions for captions in data["test"]["captions"] for _ in range(SAMPLES)])["cider_d"]
        groups = [texts[start : start + SAMPLES] for start in range(0, len(texts), SAMPLES)]
        print(f"{name:6} CIDEr-D {cider:.2f}, mBLEU-4 {caption_diversity(groups)['mbleu_4']:.2f}: {groups[0]}")

    show("before")
    optimizer = torch.optim.AdamW(
        [w for w in model.parameters() if w.requires_grad], lr=LEARNING_RATE, weight_decay=0.0
    )
    for step in range(STEPS):
        rows = random.sample(range(len(train)), BATCH_SIZE)
        ids, mask = write(model, train[rows].repeat_interleave(SAMPLES, dim=0), do_sample=True)
        best, best_mask = write(model, train[rows], do_sample=False)
        cider, greedy = cider_of(ids, mask, rows), cider_of(best, best_mask, rows)  # (B, s), (B, 1)
        loss = loss_of(model, train[rows], ids, mask, cider, greedy)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:3}  CIDEr-D of samples {cider.mean():.2f}, of greedy captions {greedy.mean():.2f}")
    show("after")
