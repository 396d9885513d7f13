"""Who finds images from captions here."""

JUDGE = "scenes:clip-judge"
