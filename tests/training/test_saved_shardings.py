"""What a layer saves, cut over devices: partitioned inputs and gathered weights."""

import functools

import optax
import pytest

from jaxckpt.compiler.flops import count_flops
from jaxckpt.compiler.hlo import parse_hlo
from jaxckpt.compiler.memory import compile_step, memory_bytes
from jaxckpt.models.presets import ConfigError
from jaxckpt.training.canonical import to_canonical
from jaxckpt.training.divisible import check_divisible
from jaxckpt.training.inspect import layer_residuals
from jaxckpt.training.prepare import run_notes

pytestmark = pytest.mark.xdist_group("shardings")  # what is made once is shared

STREAM = 4 * 8 * 16 * 32  # bytes of a layer's input: float32, batch, time, dim
KERNELS = 4 * (4 * 32 * 32 + 3 * 32 * 64)  # bytes of a layer's matrices, float32


@pytest.fixture(scope="module")
def gradient(make_config, programs, make_batch):
    """``(policy, mesh, **fields) -> per-layer list``: of a first step, times 0.1."""

    def find(policy, mesh="data:1", **fields):
        program = programs(make_config(policy, clip_norm=1e9, **fields), mesh)
        state, _ = program.step(program.init(), make_batch(program, seed=0))
        canonical = to_canonical(program, state)
        return optax.tree.get(canonical["opt_state"], "mu")

    return find


@pytest.fixture(scope="module")
def compiled(make_config, programs):
    """``(policy, mesh, depth) -> (program, executable)``, well optimized."""

    @functools.cache
    def compile(policy, mesh, depth=2):
        config = make_config(policy, architecture=dict(num_layers=depth))
        program = programs(config, mesh)
        arguments = (program.state, program.batch)
        return program, compile_step(program.step, *arguments, platform="cpu")[0]

    return compile


@pytest.fixture(scope="module")
def kept(make_config, place):
    """``(policy, mesh) -> [(name, bytes per device)]`` of one layer."""

    def find(policy, mesh, **fields):
        config = make_config(policy, **fields)
        placement = place(mesh, config.sequence_parallel, config.partitions)
        residuals = layer_residuals(config, placement)
        (policy,) = config.layers.policies()
        return [(one.name, one.nbytes) for one in residuals(policy)]

    return find


# ---------------------------------------------------------------- partitioned inputs


@pytest.mark.parametrize(
    "policy, fields",
    [
        ("full", dict(partition_activations=True)),
        ("deepspeed:partition", {}),
        ("megatron:full:block:3:distribute", {}),
    ],
)
def test_a_layer_keeps_its_part_of_the_input(kept, policy, fields):
    (kept_whole,) = kept("full", "tensor:2")
    (kept_part,) = kept(policy, "tensor:2", **fields)
    assert kept_whole == ("decoder_layer_input", STREAM)
    assert kept_part == ("decoder_layer_input", STREAM // 2)


@pytest.mark.slow
def test_compiled_memory_falls_by_just_the_other_devices_parts(compiled):
    def per_layer(policy):
        temps = [
            memory_bytes(compiled(policy, "tensor:2", depth)[1]).temp_bytes
            for depth in (8, 16)
        ]
        return (temps[1] - temps[0]) / 8

    assert per_layer("full") - per_layer("deepspeed:partition") == STREAM // 2


@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize(
    "policy",
    [
        "deepspeed:partition",
        pytest.param("megatron:full:uniform:2:distribute", marks=pytest.mark.slow),
    ],
)
def test_gradients_do_not_depend_on_the_partition(gradient, assert_same, policy):
    # Two devices add up in another order than one.
    assert_same(gradient(policy, "tensor:2"), gradient("none"), rtol=5e-6)


def test_a_partition_needs_a_tensor_axis(make_config):
    for fields, part in (
        (dict(policy="deepspeed:partition"), "deepspeed:partition shards"),
        (dict(partition_activations=True), "--partition-activations shards"),
    ):
        with pytest.raises(ConfigError, match=part):
            check_divisible(make_config(**fields), {"fsdp": 4})
    with pytest.raises(ConfigError, match="use --seq-len=14"):
        config = make_config("deepspeed:partition", seq_len=13)
        check_divisible(config, {"tensor": 2})


def test_the_run_says_what_became_of_the_partition(make_config):
    def notes(policy, **fields):
        return run_notes(make_config(policy, **fields), {"tensor": 2})

    (note,) = notes("deepspeed:partition")
    assert note == "layer inputs are kept cut over tensor:2, and gathered again"
    (note,) = notes("deepspeed:partition", sequence_parallel=True)
    assert "sequence parallelism already" in note
    assert notes("full") == ()


# ---------------------------------------------------------------- gathered weights


def test_gathered_weights_are_kept_whole_or_cut_over_tensor_alone(kept):
    for mesh, parts in (("fsdp:4", 1), ("fsdp:2,tensor:2", 2)):
        found = kept("save:gathered_weights", mesh)
        weights = [nbytes for name, nbytes in found if name == "gathered_weights"]
        assert len(weights) == 7
        assert sum(weights) == KERNELS // parts
        assert len(found) == 8  # and the input


def collectives(compiled, policy, mesh):
    sent = parse_hlo(compiled(policy, mesh)[1].as_text()).collective_bytes
    return {phase: sum(kinds.values()) for phase, kinds in sent.items()}


@pytest.mark.slow
def test_kept_weights_are_not_gathered_again(compiled):
    again, once = (
        collectives(compiled, policy, "fsdp:4")
        for policy in ("full", "save:gathered_weights")
    )
    assert once["forward"] == again["forward"]
    assert once["recompute"] == 0
    spared = sum(again.values()) - sum(once.values())
    assert spared == 2 * KERNELS * 3 // 4  # of both layers


@pytest.mark.slow
@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize(
    "mesh", ["data:2,fsdp:2,tensor:2", pytest.param("fsdp:4", marks=pytest.mark.slow)]
)
def test_gradients_do_not_depend_on_who_gathers(gradient, assert_same, mesh):
    plan = "1xsave:gathered_weights+2xfull"
    assert_same(gradient(plan, mesh), gradient("none"), rtol=2e-6)


def test_gathered_weights_need_an_fsdp_axis(make_config):
    config = make_config("save:gathered_weights")
    check_divisible(config, {"fsdp": 2})
    with pytest.raises(ConfigError, match="gathered over the fsdp axis"):
        check_divisible(config, {"tensor": 2})


@pytest.mark.parametrize("rule", ["none", "everything_saveable"])
def test_layers_that_keep_all_would_keep_gathered_weights(make_config, rule):
    with pytest.raises(ConfigError, match=f"layers under {rule} would keep"):
        make_config(f"1xsave:gathered_weights+2x{rule}")


def test_on_three_axes_no_matmul_of_a_layer_is_whole(compiled):
    program, executable = compiled("full", "data:2,fsdp:2,tensor:2")
    arguments = (program.state, program.batch)
    of_all = count_flops(program.step, *arguments)
    found = parse_hlo(executable.as_text()).flops
    assert found.forward * 8 == of_all.forward
    assert found.recompute * 8 == of_all.recompute
