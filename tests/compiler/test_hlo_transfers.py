"""Collectives and host transfers: groups, and the bytes that one device sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxckpt.compiler.hlo import parse_hlo


def compiled(fn, *args):
    return parse_hlo(jax.jit(fn).lower(*args).compile().as_text())


def shape(*sizes, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def entry(*lines, devices=8, before=""):
    """A program of one computation: its instructions, the last one the result."""
    *body, root = lines
    text = "\n".join(f"  {line}" for line in [*body, f"ROOT {root}"])
    header = f"HloModule jit_step, is_scheduled=true, num_partitions={devices}"
    return parse_hlo(f"{header}\n\n{before}\nENTRY %main () -> f32[] {{\n{text}\n}}\n")


def only(program, name):
    (found,) = [r for r in program.instructions if r.instruction.name == name]
    return found


FORWARD = 'metadata={op_name="jit(s)/jvp(M)/mul"}'
BACKWARD = 'metadata={op_name="jit(s)/transpose(jvp(M))/mul"}'


# Collectives


@pytest.mark.parametrize(
    ("notation", "groups"),
    [
        ("{{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=8,'b'=1] {'a'}", [list(range(8))]),
        ("mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", [[0, 2], [1, 3]]),
        (
            "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}",
            [[0, 4], [1, 5], [2, 6], [3, 7]],
        ),
    ],
)
def test_replica_groups(notation, groups):
    program = entry(
        "%x = f32[8]{0} parameter(0)",
        f"%c = f32[8]{{0}} all-reduce(%x), replica_groups={notation}, to_apply=%add",
    )
    assert program.groups(only(program, "c").instruction) == groups


@pytest.mark.parametrize(
    ("call", "kind", "nbytes"),
    [
        ("f32[40]{0} all-gather(%x), dimensions={0}", "all-gather", 3 * 40),
        ("f32[10]{0} all-reduce(%x)", "all-reduce", 2 * 3 * 10),
        ("f32[2]{0} reduce-scatter(%x)", "reduce-scatter", 3 * 10),
        ("f32[10]{0} all-to-all(%x)", "all-to-all", 3 * 10),
    ],
)
def test_bytes_sent_on_a_ring_of_four(call, kind, nbytes):
    program = entry(
        "%x = f32[10]{0} parameter(0)",
        f"%c = {call}, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, {BACKWARD}",
    )
    sent = program.collective_bytes
    assert sent["backward"] == {kind: nbytes}
    assert sent["forward"] == sent["recompute"] == sent["other"] == {}


def test_permute_sends_its_buffer_and_groups_of_one_send_nothing():
    program = entry(
        "%x = f32[10]{0} parameter(0)",
        "%p = f32[10]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
        "%g = f32[10]{0} all-gather(%p), replica_groups={{0},{1}}, dimensions={0}",
    )
    assert program.collective_bytes["other"] == {"collective-permute": 40}


def test_an_asynchronous_pair_counts_once():
    inside = """
%wrapped (p: f32[10]) -> f32[2] {
  %p = f32[10]{0} parameter(0)
  ROOT %rs = f32[2]{0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}
}
"""
    program = entry(
        "%x = f32[10]{0} parameter(0)",
        "%s = (f32[10]{0}, f32[40]{0}) all-gather-start(%x), replica_groups=[2,4]<=[8]",
        "%d = f32[40]{0} all-gather-done(%s)",
        "%t = ((f32[10]{0}), f32[2]{0}, u32[]) async-start(%x), calls=%wrapped",
        "%u = f32[2]{0} async-done(%t)",
        before=inside,
    )
    assert program.collective_bytes["other"] == {
        "all-gather": 3 * 40,
        "reduce-scatter": 30,
    }
    assert only(program, "s").asynchronous and only(program, "rs").asynchronous


def test_collectives_in_a_loop_that_xla_compiled():
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    rows = NamedSharding(mesh, P("d"))

    def fn(x, ws):
        def body(x, w):
            w = lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
            return jnp.tanh(x @ w), None

        return jnp.sum(lax.scan(body, x, ws)[0])

    ws = shape(30, 16, 16, sharding=NamedSharding(mesh, P(None, "d")))
    program = compiled(fn, shape(8, 16, sharding=rows), ws)
    assert program.module.num_devices == 4
    assert program.flops.total == 30 * 2 * 2 * 16 * 16  # two rows on each device
    assert program.collective_bytes["other"] == {
        "all-gather": 30 * 3 * (4 * 16 * 16) // 4,
        "all-reduce": 2 * 3 * 4 // 4,
    }


# Host memory

HOST_SLICES = """
%write (h: f32[4,10], x: f32[1,10], i: s32[]) -> f32[4,10] {
  %h = f32[4,10]{1,0:S(5)} parameter(0)
  %x = f32[1,10]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %dus = f32[4,10]{1,0:S(5)} dynamic-update-slice(%h, %x, %i, %i)
}

%read (h.1: f32[4,10], i.1: s32[]) -> f32[1,10] {
  %h.1 = f32[4,10]{1,0:S(5)} parameter(0)
  %i.1 = s32[] parameter(1)
  ROOT %ds = f32[1,10]{1,0} dynamic-slice(%h.1, %i.1, %i.1), dynamic_slice_sizes={1,10}
}
"""


def test_host_transfers_are_the_slices_and_copies():
    program = entry(
        "%host = f32[4,10]{1,0:S(5)} parameter(0)",
        "%x = f32[1,10]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        "%w = ((f32[4,10]{1,0:S(5)}, f32[1,10]{1,0}, s32[]), f32[4,10]{1,0:S(5)}, "
        f"u32[]) fusion-start(%host, %x, %i), kind=kLoop, calls=%write, {FORWARD}",
        f"%w.1 = f32[4,10]{{1,0:S(5)}} fusion-done(%w), {FORWARD}",
        f"%r = f32[1,10]{{1,0}} fusion(%w.1, %i), kind=kLoop, calls=%read, {BACKWARD}",
        f"%c = f32[4,10]{{1,0}} copy(%w.1), {BACKWARD}",
        f"%same = f32[4,10]{{1,0}} copy(%c), {BACKWARD}",
        before=HOST_SLICES,
    )
    moved = program.host_transfer_bytes
    assert moved == {"forward": 40, "recompute": 0, "backward": 40 + 160, "other": 0}
    assert only(program, "w").asynchronous and not only(program, "r").asynchronous
