"""The simulator by hand: every byte of small schedules, and what it refuses."""

import pytest

from jaxckpt.schedules import (
    Chain,
    Checkpointed,
    InvalidSchedule,
    Option,
    Schedule,
    Stage,
    StageCosts,
    simulate,
    uniform_chain,
)


def stage(output, forward, backward, kept, **rest):
    temporaries = {k: rest.pop(k, 0) for k in ("forward_temporary",)}
    temporaries["backward_temporary"] = rest.pop("backward_temporary", 0)
    return StageCosts(
        output, forward, (Option(kept, forward, backward, **temporaries),), **rest
    )


CHAIN = Chain((stage(2, 1, 10, 7), stage(3, 2, 20, 11), stage(5, 4, 40, 13)), input=100)


def seen(*items, chain=CHAIN):
    result = simulate(Schedule(items), chain)
    return result.time, result.peak, result.forward_runs


def test_everything_stored():
    # Gradient 5 from the start; stored 7 + 11 + 13 at the turn.
    assert seen(Stage(0), Stage(1), Stage(2)) == (77, 100 + 5 + 31, (1, 1, 1))


def test_one_segment():
    # First pass: 5 + 2 + 3. Turn: outputs 3, stored 13, gradient 5.
    # Second pass: gradient 3, stored 7 + 11.
    time, peak, runs = seen(Checkpointed((Stage(0), Stage(1))), Stage(2))
    assert (time, peak, runs) == (77 + 3, 100 + max(10, 21, 21), (2, 2, 1))


def test_nested_segments():
    inner = Checkpointed((Stage(0),))
    time, peak, runs = seen(Checkpointed((inner, Stage(1))), Stage(2))
    # Second pass: gradient 3, output 2, stored 11; then gradient 2, stored 7.
    assert (time, peak, runs) == (77 + 3 + 1, 100 + max(10, 21, 16, 9), (3, 2, 1))


def test_last_segment_may_be_checkpointed():
    time, peak, runs = seen(Stage(0), Checkpointed((Stage(1), Stage(2))))
    # Its first output is dropped: second pass holds 7 + 11 + 13 and gradient 5.
    assert (time, peak, runs) == (77 + 6, 100 + 5 + 31, (1, 2, 2))


def test_temporaries_count_in_their_own_step():
    both = dict(forward_temporary=50, backward_temporary=70)
    chain = Chain((stage(1, 1, 1, 2, **both), stage(1, 1, 1, 1)))
    assert seen(Stage(0), Stage(1), chain=chain)[1] == 1 + 2 + 70
    chain = Chain((stage(1, 1, 1, 2, forward_temporary=50), stage(1, 1, 1, 1)))
    assert seen(Stage(0), Stage(1), chain=chain)[1] == 1 + 2 + 50
    chain = Chain((stage(1, 1, 1, 2, temporary=30), stage(1, 1, 1, 1)))
    assert seen(Stage(0), Stage(1), chain=chain)[1] == 1 + 2 + 1
    assert seen(Checkpointed((Stage(0),)), Stage(1), chain=chain)[1] == 1 + 1 + 30


def test_gradient_of_the_last_stage_is_there_from_the_start():
    chain = Chain((stage(1, 1, 1, 9), stage(1, 1, 1, 1, gradient=20)))
    assert seen(Stage(0), Stage(1), chain=chain)[1] == 9 + 1 + 20
    loss = Chain((stage(1, 1, 1, 9), stage(1, 1, 1, 1, gradient=0)))
    assert seen(Stage(0), Stage(1), chain=loss)[1] == 9 + 1


def test_options():
    chain = uniform_chain(2, kept=(6, 2), backward=(1, 5))
    assert seen(Stage(0, 1), Stage(1), chain=chain) == (8, 2 + 6 + 1, (1, 1))


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ((Stage(0), Stage(2)), "output of stage 1 is not in memory"),
        ((Stage(1), Stage(0), Stage(2)), "output of stage 0 is not in memory"),
        ((Checkpointed((Stage(0), Stage(2))),), "output of stage 1 is not in memory"),
        ((Stage(0), Stage(1)), "gradient of stage 1 is not in memory"),
        ((Stage(1), Stage(2)), "output of stage 0 is not in memory"),
        ((Stage(0), Stage(0), Stage(1), Stage(2)), "made twice"),
        ((Checkpointed((Stage(0), Stage(0))), Stage(1)), "output of stage 0 is made"),
        ((Stage(0), Stage(1), Stage(2), Stage(3)), "no stage 3"),
        ((Checkpointed((Stage(-1),)), Stage(0)), "no stage -1"),
        ((Stage(0), Stage(1, 1), Stage(2)), "stage 1 has 1 options, no 1"),
        ((Stage(0), Stage(1, -1), Stage(2)), "stage 1 has 1 options, no -1"),
        ((), "at least one stage"),
    ],
)
def test_refused(items, message):
    with pytest.raises(ValueError, match=message) as caught:
        seen(*items)
    assert isinstance(caught.value, InvalidSchedule)


def test_deeper_than_the_recursion_limit(few_frames):
    items = (Stage(0),)
    for index in range(1, 300):
        items = (Checkpointed(items), Stage(index))
    with few_frames:
        result = simulate(Schedule(items), uniform_chain(300))
    assert result.forward_runs == tuple(range(300, 0, -1))
    assert result.peak == 3
