"""Profiles: every moment counts once, and goes to the phase of what ran."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxckpt.compiler.profile import (
    STEP,
    Event,
    ProfiledProgram,
    read_events,
)

HLO = """\
HloModule jit_step, is_scheduled=true, replica_count=1, num_partitions=2

%fused (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %inside = f32[8,8]{1,0} tanh(%p), metadata={op_name="jit(step)/jvp(f)/tanh"}
}

%body (c: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %c = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%c), index=1
  %again.1 = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, metadata={op_name="jit(step)/transpose(jvp(f))/while/body/\
rematted_computation/mlp/dot_general" source_file="user.py" source_line=7}
  %back.1 = f32[8,8]{1,0} dot(%again.1, %x), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}, metadata={op_name="jit(step)/transpose(jvp(f))/while/body/\
dot_general"}
  ROOT %out = (s32[], f32[8,8]{1,0}) tuple(%i, %back.1)
}

%condition (d: (s32[], f32[8,8])) -> pred[] {
  %d = (s32[], f32[8,8]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (w: f32[8,8]) -> f32[8,8] {
  %w = f32[8,8]{1,0} parameter(0)
  %tanh_fusion.2 = f32[8,8]{1,0} fusion(%w), kind=kLoop, calls=%fused, \
metadata={op_name="jit(step)/jvp(f)/tanh"}
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,8]{1,0}) tuple(%zero, %tanh_fusion.2)
  %while.3 = (s32[], f32[8,8]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"2"}}
  %grad = f32[8,8]{1,0} get-tuple-element(%while.3), index=1
  %all-reduce.4 = f32[8,8]{1,0} all-reduce(%grad), replica_groups={{0,1}}, \
to_apply=%add, metadata={op_name="jit(step)/transpose(jvp(f))/psum"}
  ROOT %update.5 = f32[8,8]{1,0} subtract(%w, %all-reduce.4), \
metadata={op_name="jit(step)/sub"}
}
"""
MS = 1e6  # a trace counts nanoseconds


@pytest.fixture(scope="module")
def program():
    return ProfiledProgram(HLO)


def ran(name, start, end, device="gpu", module="jit_step"):
    return Event(device, module, (name,), start * MS, end * MS)


def milliseconds(times):
    names = "wall forward recompute backward other communication unjoined idle"
    return {
        name: round(1e3 * getattr(times, name), 6)
        for name in names.split()
        if getattr(times, name)
    }


def test_a_loop_and_its_body_count_once(program):
    events = [
        ran("tanh_fusion.2", 0, 2),
        ran("while.3", 2, 13),
        ran("again.1", 2, 5),
        ran("back.1", 5, 7),
        ran("again.1", 8, 11),
        ran("back.1", 11, 13),
        ran("update.5", 13, 14),
    ]
    times = program.attribute(events)
    assert milliseconds(times) == {
        "wall": 14,
        "forward": 2,
        "recompute": 6,
        "backward": 4,
        "other": 1,
        "idle": 1,  # between two iterations
    }
    assert times.joined == 1
    assert times.recompute_share_of_backward == pytest.approx(0.6)
    assert times.recompute_share_of_step == pytest.approx(6 / 14)
    (value,) = times.recomputed
    assert value.name.startswith("mlp") and value.source == "user.py:7"
    assert value.seconds == pytest.approx(6e-3)
    assert value.nbytes == 2 * 8 * 8 * 4  # two iterations, each keeps one


def test_a_loop_whose_body_was_not_traced_counts_itself(program):
    times = program.attribute([ran("tanh_fusion.2", 0, 2), ran("while.3", 2, 5)])
    assert times.idle == 0
    assert times.wall == pytest.approx(5e-3)


def test_what_runs_side_by_side_shares_the_moment(program):
    events = [ran("again.1", 0, 4), ran("back.1", 2, 6)]
    times = program.attribute(events)
    assert milliseconds(times) == {"wall": 6, "recompute": 3, "backward": 3}


def test_only_communication_that_nothing_hides_counts(program):
    events = [ran("back.1", 0, 4), ran("all-reduce.4", 2, 9)]
    times = program.attribute(events)
    assert milliseconds(times) == {"wall": 9, "backward": 4, "communication": 5}
    assert times.hidden_communication == pytest.approx(2e-3)


def test_what_the_program_does_not_have_is_reported(program):
    events = [
        ran("back.1", 0, 6),
        ran("MemcpyH2D", 5, 7),
        ran("back.1", 7, 8, module="jit_other"),
    ]
    times = program.attribute(events)
    assert milliseconds(times) == {"wall": 8, "backward": 6, "unjoined": 2}
    assert times.joined == pytest.approx(6 / 9)


def test_the_window_cuts_and_makes_idle(program):
    events = [ran("back.1", 0, 4), ran("update.5", 50, 60)]
    times = program.attribute(events, window=(2 * MS, 10 * MS))
    assert milliseconds(times) == {"wall": 8, "backward": 2, "idle": 6}


def test_devices_are_averaged(program):
    events = [ran("back.1", 0, 4, "gpu 0"), ran("back.1", 0, 8, "gpu 1")]
    times = program.attribute(events, window=(0, 8 * MS))
    assert milliseconds(times) == {"wall": 8, "backward": 6, "idle": 2}


@pytest.mark.parametrize(
    "name", ["tanh_fusion.2", "tanh_fusion_2", "tanh_fusion.2.clone"]
)
def test_names_with_suffixes_are_joined(program, name):
    times = program.attribute([ran(name, 0, 4)])
    assert milliseconds(times) == {"wall": 4, "forward": 4}


def test_a_kernel_in_a_captured_graph_goes_by_its_own_name(program):
    event = Event("gpu", "jit_step", ("while.3", "back_1"), 0, MS)
    assert milliseconds(program.attribute([event])) == {"wall": 1, "backward": 1}


def test_no_events_is_an_error(program, tmp_path):
    with pytest.raises(ValueError, match="no instruction"):
        program.attribute([])
    with pytest.raises(ValueError, match="no .xplane.pb"):
        program.phase_times(tmp_path)


def fake(name, start, end, **stats):
    return SimpleNamespace(name=name, start_ns=start, end_ns=end, stats=stats.items())


def plane(name, **lines):
    found = [SimpleNamespace(name=key, events=lines[key]) for key in lines]
    return SimpleNamespace(name=name, lines=found)


def test_a_cpu_instruction_ends_where_its_end_is_told():
    op = {"hlo_op": "dot.1", "hlo_module": "jit_step", "device_ordinal": 1}
    thread = [
        fake("ThunkExecutor::Execute", 0, 90),
        fake("dot.1", 10, 20, _p=7, **op),
        fake("copy.2", 30, 40, _p=8, **op | {"hlo_op": "copy.2"}),
    ]
    other = [fake("end: dot.1", 70, 71, _c=7)]
    main = [fake(STEP, 5, 95)]
    host = plane("/host:CPU", main=main, a=thread, b=other)
    events, window = read_events(SimpleNamespace(planes=[host]))
    assert window == (5, 95)
    assert [(e.names, e.start, e.end) for e in events] == [
        (("dot.1",), 10, 70),
        (("copy.2",), 30, 40),
    ]
    assert {event.device for event in events} == {"/host:CPU:1"}


def test_on_a_gpu_streams_count_and_the_host_only_frames_the_step():
    kernel = {"hlo_op": "fusion.1", "hlo_module": "jit_step"}
    host = plane("/host:CPU", main=[fake(STEP, 5, 95), fake("x", 6, 7, **kernel)])
    gpu = plane(
        "/device:GPU:0",
        **{
            "Stream #13(compute)": [fake("loop_fusion_1", 10, 20, **kernel)],
            "Framework Ops": [fake("jit(step)", 10, 20)],
        },
    )
    events, window = read_events(SimpleNamespace(planes=[host, gpu]))
    assert window == (5, 95)
    assert [event.names for event in events] == [("fusion.1", "loop_fusion_1")]


def test_a_real_profile_is_joined_whole(tmp_path):
    @jax.checkpoint
    def layer(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w), None

    def loss(weights, x):
        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    weights, x = jnp.ones((6, 256, 256)) / 256, jnp.ones((512, 256))
    compiled = jax.jit(jax.grad(loss)).lower(weights, x).compile()
    jax.block_until_ready(compiled(weights, x))
    with jax.profiler.trace(str(tmp_path)):
        with jax.profiler.TraceAnnotation(STEP):
            jax.block_until_ready(compiled(weights, x))
    program = ProfiledProgram(compiled.as_text())
    assert re.match("jit_", program.name)
    times = program.phase_times(tmp_path)
    assert times.joined > 0.9
    parts = (times.forward, times.recompute, times.backward, times.other)
    parts += (times.communication, times.unjoined, times.idle)
    assert sum(parts) == pytest.approx(times.wall, rel=1e-6)
    assert times.forward > 0 and times.backward > times.recompute > 0
    assert sum(v.seconds for v in times.recomputed) == pytest.approx(times.recompute)
    assert times.recomputed[0].source.split("/")[-1].startswith("test_profile.py:")
