"""Layer plans: text and tree are one thing, at any depth, grouped as asked."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt.layers import (
    Grouping,
    LayerPlan,
    Run,
    layer_plan,
    parse_layers,
    sqrt_group,
)
from jaxckpt.policies import FULL, NONE, Policy, PolicyError, parse_policy

POLICY = st.sampled_from(
    [
        "none",
        "full",
        "minimal",
        "dots_saveable",
        "save:a",
        "offload:x1",
        "save:a/offload:b",
    ]
).map(parse_policy)
COUNT = st.integers(1, 12)
LAYER_RUN = st.builds(Run, COUNT, POLICY)
RUN = st.recursive(
    LAYER_RUN,
    lambda inner: st.builds(
        Run, COUNT, st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=6,
)
PLAN = st.lists(RUN, min_size=1, max_size=4).map(lambda runs: LayerPlan(tuple(runs)))
GROUPING = st.builds(Grouping, st.integers(1, 99) | st.just("sqrt"), POLICY)

# min over k of k + ceil(n/k): Chen et al. 2016, arXiv 1604.06174, section 4.1.
CHEN_ORACLE = {
    8: 6, 12: 7, 16: 8, 24: 10, 25: 10, 32: 12, 36: 12, 48: 14, 64: 16,
    96: 20, 100: 20, 105: 21, 126: 23, 128: 23, 1000: 64, 1024: 64,
}  # fmt: skip


def expanded(runs) -> list[Policy]:
    """The policy of every layer, first to last."""
    layers = []
    for run in runs:
        body = expanded(run.group) if run.group else [run.policy]
        layers += run.count * body
    return layers


@given(PLAN)
def test_text_and_plan_are_one_thing(plan):
    assert parse_layers(str(plan)) == plan
    assert parse_layers(plan) is plan
    assert repr(plan) == f"LayerPlan({str(plan)!r})"
    assert hash(parse_layers(str(plan))) == hash(plan)


@given(GROUPING | POLICY)
def test_text_and_depth_free_form_are_one_thing(layers):
    assert parse_layers(str(layers)) == layers
    assert hash(parse_layers(str(layers))) == hash(layers)


@given(PLAN)
def test_a_plan_counts_its_layers_and_lists_its_policies(plan):
    layers = expanded(plan.runs)
    assert plan.num_layers == len(layers)
    assert plan.policies() == tuple(dict.fromkeys(layers))
    assert plan.num_layers == sum(
        count * math.prod(around) for _, count, around in plan.leaves()
    )
    assert layer_plan(plan, plan.num_layers) is plan


@given(PLAN, st.sampled_from(["", " ", "  ", "\t"]))
def test_spaces_around_x_and_plus_do_not_matter(plan, space):
    text = str(plan).replace("+", f"{space}+{space}")
    for digit in "0123456789":  # an x after a digit, not the one of a value's name
        text = text.replace(f"{digit}x", f"{digit}{space}x{space}")
    text = text.replace("(", f"({space}").replace(")", f"{space})")
    assert parse_layers(f"{space}{text}{space}") == plan


@given(st.text(alphabet="0123x+()/: ,savefulnoqrtry", max_size=20))
def test_any_text_parses_or_is_a_one_line_error(text):
    try:
        layers = parse_layers(text)
    except PolicyError as error:
        assert "\n" not in str(error)
    else:
        assert parse_layers(str(layers)) == layers


@pytest.mark.parametrize("num_layers", [1, 7, 37])
@pytest.mark.parametrize("text", ["none", "full", "minimal", "save:a", "offload:a"])
def test_a_policy_alone_is_one_run_at_any_depth(text, num_layers):
    plan = layer_plan(text, num_layers)
    assert plan.runs == (Run(num_layers, parse_policy(text)),)


@pytest.mark.parametrize("num_layers", CHEN_ORACLE)
def test_sqrt_reaches_the_oracle_of_chen_2016(num_layers):
    size = sqrt_group(num_layers)
    assert size + math.ceil(num_layers / size) == CHEN_ORACLE[num_layers]
    plan = layer_plan("sqrt", num_layers)
    groups = sum(run.count for run in plan.runs)
    live = max(run.layers_per_iteration for run in plan.runs)
    assert groups + live == CHEN_ORACLE[num_layers]
    assert plan.num_layers == num_layers


@pytest.mark.parametrize("root", range(1, 12))
def test_sqrt_of_a_perfect_square_is_two_roots(root):
    size = sqrt_group(root * root)
    assert size + math.ceil(root * root / size) == 2 * root


@given(st.integers(1, 300))
def test_sqrt_is_the_smaller_best_size_of_all(num_layers):
    cost = {k: k + math.ceil(num_layers / k) for k in range(1, num_layers + 1)}
    best = min(cost.values())
    assert sqrt_group(num_layers) == min(k for k in cost if cost[k] == best)


@pytest.mark.parametrize("policy", ["full", "save:a", "none"])
@pytest.mark.parametrize("num_layers", [1, 2, 7, 13, 36, 37])
def test_h1_every_k_holds_all_layers_for_every_k(num_layers, policy):
    policy = parse_policy(policy)
    for size in range(1, num_layers + 1):
        plan = layer_plan(f"every:{size}/{policy}", num_layers)
        assert expanded(plan.runs) == num_layers * [policy]
        assert plan.runs == layer_plan(Grouping(size, policy), num_layers).runs
        sizes = [
            run.layers_per_iteration for run in plan.runs for _ in range(run.count)
        ]
        if size > 1:  # groups of one layer are the layers themselves
            whole, rest = divmod(num_layers, size)
            assert sizes == whole * [size] + [rest] * (rest > 0)


def test_every_one_is_plain_per_layer_checkpointing():
    assert layer_plan("every:1", 7) == layer_plan("full", 7)


def test_a_remainder_of_one_layer_is_no_group():
    assert str(layer_plan("every:6", 37)) == "6x6xnothing_saveable+1xnothing_saveable"
    assert str(layer_plan("every:6/none", 37)) == "6x6xnone+1x1xnone"


@pytest.mark.parametrize(
    "text, printed, num_layers",
    [
        ("sqrt", "6x6xnothing_saveable", 36),
        ("sqrt/save:a", "6x6xsave:a", 36),
        (" sqrt / save:a ", "6x6xsave:a", 36),
        ("every:4", "9x4xnothing_saveable", 36),
        ("every: 4 / minimal", "9x4xdots_with_no_batch_dims_saveable", 36),
        ("12xsave:a,b+20xfull", "12xsave:a,b+20xnothing_saveable", 32),
        ("12 x save:a,b + 20 x full", "12xsave:a,b+20xnothing_saveable", 32),
        ("16xsqrt+2xnone", "4x4xnothing_saveable+2xnone", 18),
        ("7xevery:3/none+1xfull", "2x3xnone+1x1xnone+1xnothing_saveable", 8),
        ("2x3x4xfull", "2x3x4xnothing_saveable", 24),
        ("2x(3xfull+1xnone)", "2x(3xnothing_saveable+1xnone)", 8),
        ("2x(3x(1xnone+1xfull))", "2x3x(1xnone+1xnothing_saveable)", 12),
    ],
)
def test_forms_of_the_language(text, printed, num_layers):
    plan = layer_plan(text, num_layers)
    assert str(plan) == printed
    assert plan.num_layers == num_layers


def test_leaves_give_policy_count_and_trip_counts_around():
    plan = parse_layers("2x3x(4xfull+1xnone)+5xsave:a")
    assert list(plan.leaves()) == [
        (FULL, 4, (2, 3)),
        (NONE, 1, (2, 3)),
        (Policy(save=("a",)), 5, ()),
    ]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "an empty policy; 'none' means no checkpointing"),
        ("12xfull+4xnoen", "unknown policy 'noen'. Did you mean 'none'?"),
        ("squrt", "Did you mean 'sqrt'?"),
        ("evry:4", "Did you mean 'every:'?"),
        ("every:0", "every:K needs a whole number of layers, not '0'"),
        ("every:x", "every:K needs a whole number of layers, not 'x'"),
        ("every:-2", "every:K needs a whole number of layers, not '-2'"),
        ("sqrt/sqrt", "'sqrt' plans a stack of layers"),
        ("0xfull", "a run has at least one layer, not 0"),
        ("-3xfull", "a run has at least one layer, not -3"),
        ("3xevery:5", "every:5 groups more than the 3 layers"),
        ("12full", "'12full' is not a run of layers such as 12xdots_saveable"),
        ("2xfull+", "'' is not a run of layers"),
        ("2xfull+none", "'none' is not a run of layers"),
        ("2x(1xfull", "parentheses do not match in '2x(1xfull'"),
        ("2x1xfull)", "parentheses do not match in '2x1xfull)'"),
        ("2x()", "'' is not a run of layers"),
    ],
)
def test_n1_a_mistake_is_one_line_that_names_it(text, message):
    with pytest.raises(PolicyError) as error:
        parse_layers(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("num_layers", [11, 13])
def test_a_plan_of_another_depth_is_an_error(num_layers):
    message = f"12xnone plans 12 layers and the stack has {num_layers}"
    with pytest.raises(PolicyError, match=message):
        layer_plan("12xnone", num_layers)


@pytest.mark.parametrize("num_layers", [0, -1])
@pytest.mark.parametrize("text", ["full", "sqrt", "every:2"])
def test_n1_a_stack_without_layers_is_an_error(text, num_layers):
    with pytest.raises(PolicyError, match="a stack has at least one layer, not"):
        layer_plan(text, num_layers)


def test_n1_a_group_larger_than_the_stack_is_an_error():
    with pytest.raises(PolicyError, match="every:8 groups more than the 7 layers"):
        layer_plan("every:8", 7)


@pytest.mark.parametrize("value", [None, 3, ["full"]])
def test_other_objects_are_no_plans(value):
    with pytest.raises(PolicyError, match="a policy is text or a Policy, not"):
        parse_layers(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Run(0, FULL),
        lambda: Run(2.0, FULL),
        lambda: Run(2, ()),
        lambda: LayerPlan(()),
        lambda: Grouping(0),
        lambda: Grouping(1.5),
        lambda: Grouping("cbrt"),
    ],
)
def test_objects_refuse_what_is_empty_or_not_whole(make):
    with pytest.raises(PolicyError):
        make()


@pytest.mark.parametrize("text", ["sqrt", "every:3/save:a", "2x3xfull+1xnone"])
def test_plans_are_frozen_and_hashable(text):
    layers = parse_layers(text)
    with pytest.raises(AttributeError):
        layers.extra = 1
    with pytest.raises(AttributeError):
        setattr(layers, next(iter(layers.__dataclass_fields__)), None)
    assert len({layers, parse_layers(text)}) == 1
