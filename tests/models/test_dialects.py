"""Policies of other systems become the right words of our own."""

import pytest

from jaxckpt.layers import layer_plan
from jaxckpt.models.dialects import FORMS, partitions, translate
from jaxckpt.models.presets import PRESETS
from jaxckpt.policies import PolicyError

LLAMA = PRESETS["llama-7b"].value_names
GPT = PRESETS["gpt2-124m"].value_names


@pytest.mark.parametrize("names", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_a_plan_that_speaks_of_existing_names(form, names):
    plan = layer_plan(translate(form.replace("K", "4"), names, 32), 32)
    for policy in plan.policies():
        assert set(policy.names) <= set(names)


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("maxtext:full", "32xnothing_saveable"),
        ("maxtext:save_out_proj", "32xsave:out_proj"),
        (
            "maxtext:minimal",
            "32xsave:key_proj,mlpwi_0,mlpwi_1,mlpwo,out_proj,query_proj,value_proj",
        ),
        ("megatron:full:uniform:8", "4x8xnone"),
        ("megatron:full:block:32", "32xnothing_saveable"),
        ("megatron:full:block:3", "3xnothing_saveable+29xnone"),
        ("deepspeed:cpu", "32xoffload:decoder_layer_input"),
        ("megatron:full:block:3:distribute", "3xnothing_saveable+29xnone"),
        ("deepspeed:partition", "32xnothing_saveable"),
        ("deepspeed:partition:cpu", "32xoffload:decoder_layer_input"),
        ("dots_saveable", "32xdots_saveable"),
    ],
)
def test_translations(text, becomes):
    assert str(layer_plan(translate(text, LLAMA, 32), 32)) == becomes


@pytest.mark.parametrize(
    "text",
    [
        "maxtext:minimall",
        "megatron:full",
        "megatron:full:uniform",
        "megatron:full:uniform:x",
        "megatron:full:block:0",
        "megatron:full:block:33",
        "megatron:none",
        "megatron:full:distribute",
        "megatron:full:uniform:4:distributed",
        "deepspeed:partitions",
    ],
)
def test_unknown_forms_are_one_line_errors(text):
    with pytest.raises(PolicyError) as error:
        translate(text, LLAMA, 32)
    assert "\n" not in str(error.value) and text in str(error.value)


def test_layer_inputs_are_cut_where_the_other_systems_cut_them():
    assert {form for form in FORMS if partitions(form)} == {
        "megatron:full:uniform:K:distribute",
        "megatron:full:block:K:distribute",
        "deepspeed:partition",
        "deepspeed:partition:cpu",
    }
    assert not partitions("save:partition")
