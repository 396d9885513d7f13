"""Facts of scenes that several tests check captions against."""

from hf_captionrl.scenes import Facts

PIGS = Facts("pig", 2, "small", "sideways", "top", "blue", "mushroom", "left of")
RED_CAT = Facts(
    *("cat", 1, "large", "upright", "top", "white", "dog", "left of"),
    colour="red",
    second_colour="blue",
    pattern="striped",
)
