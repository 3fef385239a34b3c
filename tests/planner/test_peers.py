"""PyTorch's activation memory budget on the same block: at none of its points better.

The points in torch_frontier.json are what `torch._functorch`'s partitioner saves and
recomputes for a Llama block, bf16 with float32 norms and rotary embedding; the block is
that of `experiments.peers`.
"""

import itertools

import pytest

from experiments.peers import PEER, graph, least

POINTS = [
    (group["decompositions"], *point)
    for group in PEER["points"]
    for point in group["saved_bytes_and_recompute_flops"]
]


@pytest.fixture(scope="module")
def traced():
    try:
        return graph()
    except RuntimeError as error:
        if "cuDNN is not detected" not in str(error):
            raise
        pytest.skip("cuDNN is not installed")


def test_the_forward_pass_is_the_same(traced):
    assert traced.forward_flops == 3590592659456


@pytest.mark.parametrize("decompositions, saved, flops", POINTS)
def test_no_point_of_pytorch_is_better(traced, decompositions, saved, flops):
    bytes_, ours = least(traced, saved)
    assert bytes_ <= saved
    assert ours <= flops


def test_the_staircase_is_below_theirs(traced):
    """Between its points, too, and there often strictly."""
    theirs = sorted({(saved, flops) for _, saved, flops in POINTS})
    below = 0
    for (saved, _), (after, _) in itertools.pairwise(theirs):
        _, ours = least(traced, (saved + after) // 2)
        best = min(flops for bytes_, flops in theirs if bytes_ <= (saved + after) / 2)
        assert ours <= best
        below += ours < best
    assert below >= 3
