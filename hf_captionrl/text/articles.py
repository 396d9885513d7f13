"""The indefinite article of English words."""

__all__ = ["indefinite_article"]

# Words of caption data whose first letter and first sound differ.
_SOUND_AN = ("hour", "honest", "honor", "heir")
_SOUND_A = ("uni", "use", "usu", "euro", "one", "ute", "ukulele")


def indefinite_article(word: str) -> str:
    """`a` or `an`, as the word in lower case needs it."""
    vowel = word[0] in "aeiou" and not word.startswith(_SOUND_A)
    return "an" if vowel or word.startswith(_SOUND_AN) else "a"
