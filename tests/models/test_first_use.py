"""Classes that are imported on first access, by several threads at once."""

from hf_captionrl.captioners.clipcap.registration import _OnFirstUse


def test_another_thread_may_finish_first():
    mapping = _OnFirstUse({"known": int})
    asked = []

    def load():
        asked.append(1)
        if len(asked) == 1:
            assert mapping["late"] is str  # access by another thread in the meantime
        return str

    mapping.wait_for("late", load)
    assert mapping["late"] is str
    assert mapping["late"] is str
    assert len(asked) == 2
    assert dict(mapping.items()) == {"known": int, "late": str}
