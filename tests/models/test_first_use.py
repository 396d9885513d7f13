"""Classes that are imported when they are first asked for, by several threads at once."""

from hf_captionrl.models.registration import _OnFirstUse


def test_another_thread_may_be_done_first():
    mapping = _OnFirstUse({"known": int})
    asked = []

    def load():
        asked.append(1)
        if len(asked) == 1:
            assert mapping["late"] is str  # what another thread does in the meantime
        return str

    mapping.wait_for("late", load)
    assert mapping["late"] is str
    assert mapping["late"] is str
    assert len(asked) == 2
    assert dict(mapping.items()) == {"known": int, "late": str}
