"""Trees: text, walks, and no recursion where chains are long."""

import pytest

from jaxckpt.schedules import Checkpointed, Schedule, Stage
from jaxckpt.schedules.tree import Again, Once, stages_of, unfold

NESTED = Schedule(
    (
        Checkpointed((Stage(0), Checkpointed((Stage(1), Stage(2, 3))), Stage(3))),
        Stage(4, 1),
        Checkpointed((Stage(5),)),
    )
)


def test_text():
    assert str(NESTED) == "[0 [1 2:3] 3] 4:1 [5]"
    assert repr(NESTED) == "Schedule('[0 [1 2:3] 3] 4:1 [5]')"
    assert str(Schedule((Checkpointed((Checkpointed((Stage(0),)),)),))) == "[[0]]"


def test_stages_and_depth():
    assert [stage.index for stage in NESTED.stages()] == [0, 1, 2, 3, 4, 5]
    assert [stage.option for stage in NESTED.stages()] == [0, 0, 3, 0, 1, 0]
    assert [stage.index for stage in stages_of(NESTED.items[1:])] == [4, 5]
    assert NESTED.depth == 2
    assert Schedule((Stage(0),)).depth == 0


def test_trees_are_data():
    again = Schedule(
        (
            Checkpointed((Stage(0), Checkpointed((Stage(1), Stage(2, 3))), Stage(3))),
            Stage(4, 1),
            Checkpointed((Stage(5),)),
        )
    )
    assert again == NESTED and hash(again) == hash(NESTED)
    assert Schedule(NESTED.items[:2]) != NESTED


def test_empty_segment():
    with pytest.raises(ValueError, match="at least one stage"):
        Checkpointed(())


def test_unfold_keeps_order():
    plans = {
        "all": [Again("front"), Stage(2), Once("back")],
        "front": [Stage(0), Again("inner")],
        "inner": [Stage(1)],
        "back": [Again("last"), Stage(4)],
        "last": [Stage(3)],
    }
    assert str(unfold("all", plans.__getitem__)) == "[0 [1]] 2 [3] 4"


def test_deeper_than_the_recursion_limit(few_frames):
    def expand(length):
        if length == 1:
            return [Stage(0)]
        return [Again(length - 1), Stage(length - 1)]

    with few_frames:
        schedule = unfold(300, expand)
        assert schedule.depth == 299
        assert [stage.index for stage in schedule.stages()] == list(range(300))
        assert str(schedule).endswith(" 298] 299")
