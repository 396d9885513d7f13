"""The indefinite article follows the sound of a word, not its letter."""

from hf_captionrl.text.tokenize import indefinite_article


def test_article_follows_the_sound():
    words = "dog apple hour unicorn one old user honest".split()
    assert [indefinite_article(word) for word in words] == ["a", "an", "an", "a", "a", "an", "a", "an"]
