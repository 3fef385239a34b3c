"""Meshes ranked on paper."""

import itertools

import pytest

from jaxckpt.compiler.gpu_kinds import KINDS
from jaxckpt.models.presets import model_config
from jaxckpt.planner.solve import Infeasible
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.mesh_search import for_mesh, plan_first, rank_meshes

GIB = 2**30


def run(model="llama-7b", **fields) -> TrainConfig:
    fields = {"batch_size": 8, **fields}
    return TrainConfig(model=model, architecture=model_config(model), **fields)


def needed(one) -> int:
    return one.state_bytes + one.activation_bytes


def by_mesh(config, target="h100:8", budget="70GiB"):
    return {one.text: one for one in rank_meshes(config, target, budget)}


def test_every_mesh_holds_all_devices_and_the_fastest_is_first():
    ranking = rank_meshes(run(batch_size=64), "h100:2x8", "70GiB")
    assert len(ranking) > 10
    for one in ranking:
        product = 1
        for size in one.sizes.values():
            product *= size
        assert product == 16
        assert needed(one) <= 70 * GIB
    seconds = [one.seconds for one in ranking]
    assert seconds == sorted(seconds)
    assert len({one.text for one in ranking}) == len(ranking)


def test_state_is_sixteen_bytes_a_parameter_cut_over_the_weights_axes():
    config = run()
    found = by_mesh(config)
    whole = 16 * config.architecture.num_params
    assert found["fsdp:8"].state_bytes == pytest.approx(whole / 8, rel=1e-3)
    assert found["data:2,fsdp:4"].state_bytes == pytest.approx(whole / 4, rel=1e-3)
    assert found["fsdp:4,tensor:2"].state_bytes == pytest.approx(whole / 8, rel=1e-3)


def test_compute_is_the_models_flops_over_the_peak_of_all_devices():
    config = run()
    one = by_mesh(config)["fsdp:8"]
    model, tokens = config.architecture, config.batch_size * config.sequence_length
    weights = model.num_params - model.vocab_size * model.dim  # embedding is looked up
    attention = model.num_layers * 2 * config.sequence_length * model.dim
    flops = 3 * tokens * (2 * weights + attention)
    assert one.compute_seconds == pytest.approx(
        flops / 8 / KINDS["h100"].matmul_flops, rel=1e-3
    )


def test_less_memory_recomputes_more_until_nothing_fits():
    budgets = (70, 40, 30, 20)
    seconds = [by_mesh(run(), budget=f"{b}GiB")["fsdp:8"] for b in budgets]
    shares = [one.recompute_seconds for one in seconds]
    assert shares[0] == 0 and shares[-1] > 0
    assert all(a <= b for a, b in itertools.pairwise(shares))
    with pytest.raises(Infeasible, match="under no mesh of h100:8"):
        rank_meshes(run(), "h100:8", "12GiB")


def test_tensor_over_two_hosts_is_slower_than_within_one():
    found = by_mesh(run(), "h100:2x8")
    within, across = found["fsdp:2,tensor:8"], found["tensor:16"]
    # Twice the tokens on a device, 15/16 instead of 7/8 of them sent, and 8 network
    # cards instead of the link between the GPUs of a host.
    kind = KINDS["h100"]
    slower = kind.link_bandwidth / (8 * kind.network_bandwidth)
    ratio = 2 * (15 / 16) / (7 / 8) * slower
    assert across.exposed_seconds == pytest.approx(ratio * within.exposed_seconds)


def test_the_standing_share_is_the_default_budget():
    limit = KINDS["h100"].memory_bytes
    most = max(needed(one) for one in rank_meshes(run(), "h100:8", ""))
    assert most <= 0.85 * limit


def test_sequence_parallel_goes_where_there_is_a_tensor_axis():
    config = run(sequence_parallel=True)
    for one in rank_meshes(config, "h100:8", "70GiB"):
        assert for_mesh(config, one).sequence_parallel == ("tensor" in one.sizes)


def test_the_next_mesh_is_planned_where_the_first_does_not_fit():
    ranking = rank_meshes(run(), "h100:8", "70GiB")
    asked, said = [], []

    def plan(config):
        asked.append(config.mesh)
        if len(asked) < 3:
            raise Infeasible("too much")
        return config.mesh

    assert plan_first(run(), ranking, plan, said.append) == ranking[2].text
    assert asked == [one.text for one in ranking[:3]]
    assert f"{ranking[0].text}: too much" in said

    def never(config):
        raise Infeasible("never")

    with pytest.raises(Infeasible, match="never"):
        plan_first(run(), ranking, never, said.append)


def test_a_thousand_gpus_are_ranked():
    config = run("gpt3-175b", batch_size=1024)
    ranking = rank_meshes(config, "h100:128x8", "")
    assert len(ranking) > 100
    pipelines = [one for one in ranking if one.sizes.get("pipe", 1) > 1]
    for one in pipelines:
        stages = one.sizes["pipe"]
        assert one.microbatches >= stages
        assert one.bubble_seconds >= (stages - 1) / one.microbatches * (
            one.compute_seconds + one.recompute_seconds
        )
