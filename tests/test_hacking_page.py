"""The changes and losses in docs/reward_hacking.md, compared with values computed by hand."""

from scripts.reproduction import hacking


def _point(reward, held_out, hallucination=0.1, length=5.0):
    keys = (hacking.REWARD, hacking.HELD_OUT, "hallucination", "length")
    return {
        key: {"values": value if isinstance(value, list) else [value, value]}
        for key, value in zip(keys, (reward, held_out, hallucination, length), strict=True)
    }


def test_numbers_of_a_reward_by_hand():
    # Seed 0 peaks in the middle and loses 0.2; seed 1 peaks at the end.
    points = [_point(0.5, 0.6), _point([0.7, 0.6], [0.8, 0.6]), _point(0.9, [0.6, 0.8], 0.3, 12.0)]
    record = {"learning_curves": {"SR": points}, "guard": {"SR": [100, None]}, "seeds": [0, 1], "command": "a command"}
    cells = [cell.strip() for cell in hacking.section([record]).splitlines()[2].strip("|").split("|")]
    # Half of a 95 % interval of two values that differ by 0.2: 12.706 * 0.1.
    assert cells == [
        "SR",
        "+0.400",
        "+0.100 [-1.171, 1.371]",
        "+0.300 [-0.971, 1.571]",
        "-0.100 [-1.371, 1.171]",
        "0.300",
        "12.00",
        "100, never",
    ]


def test_every_run_has_its_rewards():
    def record(name):
        return {
            "learning_curves": {name: [_point(0.5, 0.6), _point(0.6, 0.7)]},
            "guard": {name: [None, 7]},
            "seeds": [0, 1],
            "command": f"a command for {name}",
        }

    text = hacking.section([record("cosine"), record("accuracy")])
    assert "| cosine | +0.100 |" in text
    assert "| accuracy | +0.100 |" in text
    assert "Made by `a command for cosine` and `a command for accuracy`." in text


def test_large_bags_by_hand():
    def row(name, **numbers):
        return {"name": name} | {key: {"values": value} for key, value in numbers.items()}

    start = row("MLE", **{hacking.HELD_OUT: [0.5, 0.6]})
    numbers = {
        "length": [9.0, 9.0],
        "degenerate": [0.5, 0.5],
        "hallucination": [0.2, 0.2],
        "bag_7_recall_at_1": [0.4, 0.4],
    }
    rows = [start, row("penalties", **numbers, **{hacking.HELD_OUT: [0.4, 0.7]}), row("references")]
    record = {"rows": rows, "guard": {"penalties": [None, 80]}, "seeds": [0, 1], "command": "a command"}
    cells = [cell.strip() for cell in hacking.bags_section(record).splitlines()[2].strip("|").split("|")]
    # Paired by seed: -0.1 and +0.1, half an interval 12.706 * 0.1.
    assert cells == ["penalties", "9.00", "0.500", "0.200", "0.400", "+0.000 [-1.271, 1.271]", "never, 80"]


def test_without_a_result_the_page_names_the_command():
    assert "python scripts/reproduce.py --only reward_hacking_seeds" in hacking.section([None, None, None])
    assert "python scripts/reproduce.py --only large_bags_seeds" in hacking.bags_section(None)
