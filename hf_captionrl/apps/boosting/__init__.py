"""Visual Caption Boosting: richer references from human captions, a language model and a vision model."""
