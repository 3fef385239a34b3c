"""Policies are data: text and object are one thing, and mistakes are one line."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt.policies import (
    ALIASES,
    RULES,
    Policy,
    PolicyError,
    is_automatic,
    parse_policy,
)

PRESETS = [rule for rule in RULES if rule != "names"]
NAME = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.\-]{0,8}", fullmatch=True)


@st.composite
def policies(draw) -> Policy:
    rule = draw(st.sampled_from(RULES))
    if rule != "names":
        return Policy(rule)
    names = draw(st.lists(NAME, min_size=1, max_size=6, unique=True))
    cut = draw(st.integers(0, len(names)))
    return Policy(save=tuple(names[:cut]), offload=tuple(names[cut:]))


@given(policies())
def test_text_and_object_are_one_thing(policy):
    assert parse_policy(str(policy)) == policy
    assert parse_policy(policy) is policy
    assert eval(repr(policy), {"Policy": parse_policy}) == policy


@given(policies(), policies())
def test_equal_policies_print_and_hash_alike(one, other):
    assert (one == other) == (str(one) == str(other))
    assert len({one, other}) == 1 + (one != other)


@given(st.lists(NAME, min_size=1, max_size=5, unique=True), st.randoms())
def test_the_order_and_repetition_of_names_do_not_matter(names, random):
    shuffled = names * 2
    random.shuffle(shuffled)
    assert parse_policy("save:" + ",".join(shuffled)) == Policy(save=tuple(names))


@given(st.text(max_size=30))
def test_any_text_parses_or_is_a_one_line_error(text):
    try:
        policy = parse_policy(text)
    except PolicyError as error:
        assert "\n" not in str(error)
    else:
        assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize("rule", PRESETS)
def test_every_preset_reads_as_itself(rule):
    policy = parse_policy(rule)
    assert (policy.rule, policy.names, str(policy)) == (rule, (), rule)


def test_presets_and_aliases_are_these():
    assert PRESETS == [
        "none",
        "everything_saveable",
        "nothing_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
    ]
    assert ALIASES == {
        "full": "nothing_saveable",
        "minimal": "dots_with_no_batch_dims_saveable",
    }


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_is_its_rule(alias):
    assert parse_policy(alias) == Policy(ALIASES[alias])
    assert str(parse_policy(alias)) == ALIASES[alias]


@pytest.mark.parametrize(
    "text",
    [
        "save:b,a/offload:c",
        " save:b,a/offload:c ",
        "save: b , a / offload: c",
        "offload:c/save:a,b",
        "\tsave:a,b /offload :c\n",
    ],
)
def test_spaces_and_the_order_of_lists_do_not_matter(text):
    policy = parse_policy(text)
    assert policy == Policy(save=("a", "b"), offload=("c",))
    assert policy.names == ("a", "b", "c")
    assert str(policy) == "save:a,b/offload:c"


@pytest.mark.parametrize(
    "text, message",
    [
        ("dots_savable", "Did you mean 'dots_saveable'?"),
        ("ful", "Did you mean 'full'?"),
        ("noone", "Did you mean 'none'?"),
        ("everything", "Did you mean 'everything_saveable'?"),
        ("minimum", "Did you mean 'minimal'?"),
        ("sav:context", "Did you mean 'save:'?"),
        ("ofload:context", "Did you mean 'offload:'?"),
        ("zzz", "unknown policy 'zzz'. Known: none, everything_saveable"),
        ("names", "unknown policy 'names'"),
        ("", "unknown policy ''"),
        ("save:", "an empty name in 'save:'"),
        ("save:a,,b", "an empty name in 'save:a,,b'"),
        ("save:a/save:b", "save: is given twice"),
        ("save:a/offload:b,a", "'a' is both saved and offloaded"),
        ("save:a b", "'a b' is not a value name"),
        ("save:3a", "'3a' is not a value name"),
        ("full:a", "full takes no names"),
        ("dots_saveable:a", "dots_saveable takes no names"),
        ("save:a/dots_saveable", "dots_saveable takes no names"),
        ("sqrt", "'sqrt' plans a stack of layers; one block takes a policy"),
        ("every:4/full", "'every:4/full' plans a stack of layers"),
        ("12xfull + 4xnone", "'12xfull + 4xnone' plans a stack of layers"),
    ],
)
def test_n1_a_mistake_is_one_line_that_names_it_and_helps(text, message):
    with pytest.raises(PolicyError) as error:
        parse_policy(text)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [None, 3, ("save",), print])
def test_b2_none_and_other_objects_are_no_policies(value):
    with pytest.raises(PolicyError, match="a policy is text or a Policy, not"):
        parse_policy(value)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "no names to save or offload; did you mean 'full'?"),
        ({"rule": "dots"}, "unknown policy rule 'dots'; known: none, "),
        ({"rule": "dots_saveable", "save": ("a",)}, "dots_saveable takes no names"),
        ({"save": ("a",), "offload": ("a",)}, "'a' is both saved and offloaded"),
        ({"save": ("a,b",)}, "'a,b' is not a value name"),
    ],
)
def test_the_object_refuses_what_the_text_refuses(fields, message):
    with pytest.raises(PolicyError) as error:
        Policy(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["tanh.0", "dot_general.12", "scatter-add.0"])
def test_automatic_names_are_primitives_with_a_number(name):
    assert is_automatic(name) and str(parse_policy(f"save:{name}")) == f"save:{name}"


@pytest.mark.parametrize("name", ["tanh", "tanh.", "Tanh.0", "2.0"])
def test_other_names_are_not_automatic(name):
    assert not is_automatic(name)


def test_a_policy_error_is_a_value_error():
    assert issubclass(PolicyError, ValueError)


def test_a_policy_is_frozen_and_hashable():
    policy = parse_policy("save:a")
    with pytest.raises(AttributeError):
        policy.save = ("b",)
    assert {policy: 1}[Policy(save=("a",))] == 1


def test_the_policy_language_needs_no_jax():
    code = (
        "import sys, jaxckpt, jaxckpt.layers\n"
        "jaxckpt.layer_plan('sqrt', 36), jaxckpt.parse_policy('full')\n"
        "assert not {'jax', 'flax', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
