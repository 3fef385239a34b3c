"""What is live at the peak and when: bytes by hand, and against XLA's own peak."""

import os

import pytest

from jaxckpt.compiler.hlo import parse_hlo
from jaxckpt.compiler.peak import (
    PeakValue,
    device_values,
    find_peak_files,
    live_at_peak,
    peak_values,
)
from jaxckpt.compiler.timeline import Timeline, memory_timeline
from jaxckpt.compiler.value_names import argument_group, operation

pytestmark = pytest.mark.xdist_group("peak")  # what is made once is shared

# A layer loop that keeps what `up` gives, in a stack of three, and hands on `x`.
STEP = """HloModule jit_step, is_scheduled=true

%stack (s: bf16[3,8], u: bf16[8], j: s32[]) -> bf16[3,8] {
  %s = bf16[3,8]{1,0} parameter(0)
  %u = bf16[8]{0} parameter(1)
  %one = bf16[1,8]{1,0} bitcast(%u), metadata={op_name="jit(step)/jvp(M)/while/body/broadcast_in_dim"}
  %j = s32[] parameter(2)
  ROOT %dus = bf16[3,8]{1,0} dynamic-update-slice(%s, %one, %j, %j), metadata={op_name="jit(step)/jvp(M)/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice"}
}

%body (p: (s32[], bf16[8], bf16[3,8], bf16[3,8])) -> (s32[], bf16[8], bf16[3,8], bf16[3,8]) {
  %p = (s32[], bf16[8]{0}, bf16[3,8]{1,0}, bf16[3,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = bf16[8]{0} get-tuple-element(%p), index=1
  %kept = bf16[3,8]{1,0} get-tuple-element(%p), index=2
  %inputs = bf16[3,8]{1,0} get-tuple-element(%p), index=3
  %up = bf16[8]{0} negate(%x), metadata={op_name="jit(step)/jvp(M)/while/body/checkpoint/Block/up/neg" source_file="/w/model.py" source_line=7}
  %kept.1 = bf16[3,8]{1,0} fusion(%kept, %up, %i), kind=kLoop, calls=%stack
  %inputs.1 = bf16[3,8]{1,0} fusion(%inputs, %x, %i), kind=kLoop, calls=%stack
  %next = bf16[8]{0} add(%x, %up), metadata={op_name="jit(step)/jvp(M)/while/body/Block/add" source_file="/w/model.py" source_line=8}
  ROOT %out = (s32[], bf16[8]{0}, bf16[3,8]{1,0}, bf16[3,8]{1,0}) tuple(%i, %next, %kept.1, %inputs.1)
}

%more (p.1: (s32[], bf16[8], bf16[3,8], bf16[3,8])) -> pred[] {
  %p.1 = (s32[], bf16[8]{0}, bf16[3,8]{1,0}, bf16[3,8]{1,0}) parameter(0)
  ROOT %lt = pred[] constant(true)
}

ENTRY %main (a: f32[10], b: f32[10], m: f32[10]) -> f32[10] {
  %a = f32[10]{0} parameter(0), metadata={op_name="state['params']['w']"}
  %b = f32[10]{0} parameter(1), metadata={op_name="state['params']['v']['kernel']"}
  %m = f32[10]{0} parameter(2), metadata={op_name="state['opt_state'][1][0].mu['w']"}
  %start = (s32[], bf16[8]{0}, bf16[3,8]{1,0}, bf16[3,8]{1,0}) custom-call(), custom_call_target="AllocateBuffer"
  %while.1 = (s32[], bf16[8]{0}, bf16[3,8]{1,0}, bf16[3,8]{1,0}) while(%start), condition=%more, body=%body, metadata={op_name="jit(step)/jvp(M)/while"}, backend_config={"known_trip_count":{"n":"3"}}
  %gather-start = ((f32[10]{0}), f32[20]{0}) all-gather-start(%a), replica_groups={{0,1}}, dimensions={0}, metadata={op_name="jit(step)/transpose(jvp(M))/out_proj/dot_general" source_file="/w/model.py" source_line=9}
  %gather-done = f32[20]{0} all-gather-done(%gather-start)
  ROOT %new = f32[10]{0} add(%a, %b), metadata={op_name="jit(step)/add"}
}
"""  # noqa: E501

RANGES = """HloLiveRange (max 9):
  InstructionSequence:
    0:a
    1:b
    2:m
    3:start
    4:while.1
    5:all-gather.7.1
    6:gather-start
    7:gather-done
    8:new
  BufferLiveRange:
    a{}:0-9
    b{}:0-9
    m{}:0-9
    while.1{1}:4-4
    while.1{2}:4-9
    while.1{3}:4-9
    all-gather.7.1{}:6-8
    new{}:8-9
  Live ranges at 4 (peak):
    a{}: 40 bytes (cumulative: 40 bytes)
"""

ASSIGNMENT = """BufferAssignment:
allocation 0: size 40, parameter 0, shape |f32[10]| at ShapeIndex {}, maybe-live-out:
 value: <1 a @0> (size=40,offset=0): f32[10]{0}
 value: <9 new @0> (size=40,offset=0): f32[10]{0}
allocation 1: size 40, parameter 1, shape |f32[10]| at ShapeIndex {}:
 value: <2 b @0> (size=40,offset=0): f32[10]{0}
allocation 2: size 40, parameter 2, shape |f32[10]| at ShapeIndex {}:
 value: <3 m @0> (size=40,offset=0): f32[10]{0}
allocation 3: size 48, color 5, preallocated-temp:
 value: <5 while.1{3} @0> (size=48,offset=0): bf16[3,8]{1,0}
allocation 4: size 2, thread-local:
 value: <6 lt @0> (size=2,offset=0): pred[]
allocation 5: size 128, preallocated-temp:
 value: <7 while.1{2} (phi) @0> (size=48,offset=0): bf16[3,8]{1,0}
 value: <4 while.1{1} @0> (size=16,offset=48): bf16[8]{0}
 value: <8 all-gather.7.1 @0> (size=80,offset=48): f32[20]{0}
"""


def test_the_peak_by_hand():
    found = peak_values(RANGES, ASSIGNMENT, parse_hlo(STEP))
    assert found == [
        PeakValue(80, "out_proj/dot_general", "backward", "/w/model.py:9"),
        PeakValue(80, "state['params']", "other", ""),
        PeakValue(48, "up/neg", "forward", "/w/model.py:7"),
        PeakValue(40, "state['opt_state'][1][0].mu", "other", ""),
    ]


def test_a_stack_of_the_loops_own_carry_says_so():
    on_device = ASSIGNMENT.replace(" color 5,", "")
    found = peak_values(RANGES, on_device, parse_hlo(STEP))
    carry = PeakValue(48, "carry of the loop: Block/add", "forward", "/w/model.py:8")
    assert carry in found


def test_values_in_host_memory_and_of_threads_are_left_out():
    names = {(value.name, value.index) for value in device_values(RANGES, ASSIGNMENT)}
    assert ("while.1", (2,)) in names
    assert ("while.1", (3,)) not in names and ("lt", ()) not in names


def test_the_peak_is_when_most_bytes_are_live_not_when_most_values_are():
    live = live_at_peak(device_values(RANGES, ASSIGNMENT))
    names = {(value.name, value.index) for value in live}
    assert names == {
        ("a", ()),
        ("b", ()),
        ("m", ()),
        ("while.1", (2,)),
        ("all-gather.7.1", ()),
    }


def test_bytes_in_the_same_place_count_once():
    """`new` takes the place of `a`; a part of a buffer is no second buffer."""
    part = " value: <10 b{0} @0> (size=16,offset=24): f32[4]{0}\nallocation 2"
    assignment = ASSIGNMENT.replace("allocation 2", part)
    ranges = RANGES.replace("    m{}:", "    b{0}:0-9\n    m{}:")
    program = parse_hlo(STEP)
    total = sum(value.bytes for value in peak_values(ranges, assignment, program))
    assert total == sum(v.bytes for v in peak_values(RANGES, ASSIGNMENT, program))


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("state['params']['a']['b']", "state['params']"),
        ("state['opt_state'][1][0].nu['a']", "state['opt_state'][1][0].nu"),
        ("batch['inputs']", "batch['inputs']"),
        ("args[0]['w']", "args[0]"),
        ("params.layers.kernel", "params.layers.kernel"),
        ("x", "x"),
    ],
)
def test_arguments_are_grouped_by_what_they_are(name, group):
    assert argument_group(name) == group


@pytest.mark.parametrize(
    ("op_name", "expected"),
    [
        ("jit(s)/transpose(jvp(M))/while/body/closed_call/up/dot", "up/dot"),
        ("jit(s)/jvp(M)/checkpoint/rematted_computation/Block/up/dot", "up/dot"),
        ("jit(s)/jvp(M)/Block/(key/mul:value/mul)", "key/mul"),
        ("jit(s)/(reduce_sum:jvp(M)/while/body/dot)", "reduce_sum"),
        ("jit(s)/add", "add"),
        ("", ""),
    ],
)
def test_operations_lose_what_only_says_how_jax_got_there(op_name, expected):
    assert operation(op_name) == expected


def test_the_newest_dump_of_the_module_is_found(tmp_path):
    for number, name in enumerate(["jit_step", "jit_init", "jit_step"], start=1):
        tail = f"{name}.sm_9.0a_gpu_after_optimizations-live-range.txt"
        path = tmp_path / f"module_000{number}.{tail}"
        path.write_text(name)
        os.utime(path, (number, number))
    ranges, assignment = find_peak_files(tmp_path)
    assert ranges.name.startswith("module_0003.jit_step.")
    assert assignment.name.startswith("module_0003.jit_step.")
    assert assignment.name.endswith("after_optimizations-buffer-assignment.txt")
    with pytest.raises(FileNotFoundError, match="no live ranges of jit_other"):
        find_peak_files(tmp_path, "jit_other")


def test_texts_without_values_are_refused():
    with pytest.raises(ValueError, match="no live values"):
        peak_values("", ASSIGNMENT, parse_hlo(STEP))


# The timeline


def test_the_timeline_by_hand():
    """A moment for start, while, the gather's inside, start and end, and for new."""
    line = memory_timeline(RANGES, ASSIGNMENT, parse_hlo(STEP))
    assert line.position == (0, 1, 2, 3, 4, 5)
    assert line.running == ("forward",) * 2 + ("backward",) * 3 + ("other",)
    assert {kind: found for kind, found in line.live.items() if any(found)} == {
        "arguments": (120,) * 6,
        "forward": (0, 48 + 16, 48, 48, 48, 48),
        "backward": (0, 0, 0, 80, 80, 80),
    }
    assert line.total == (120, 184, 168, 248, 248, 248)
    assert line.peak == 3


def test_zeros_that_become_a_stack_are_the_stack():
    ranges = RANGES.replace("    while.1{1}:", "    start{2}:3-4\n    while.1{1}:")
    value = " value: <9 start{2} @0> (size=48,offset=0): bf16[3,8]{1,0}\n"
    head = "allocation 5: size 128, preallocated-temp:\n"
    line = memory_timeline(
        ranges, ASSIGNMENT.replace(head, head + value), parse_hlo(STEP)
    )
    assert line.live["forward"] == (48, 48 + 16, 48, 48, 48, 48)
    assert not any(line.live["other"])


def test_a_shortened_timeline_keeps_its_peak_and_its_order():
    total = (5, 1, 9, 2, 2, 7, 3)
    line = Timeline(tuple(range(7)), ("forward",) * 7, {"forward": total})
    short = line.shortened(3)
    assert (short.position, short.total) == ((0, 2, 5), (5, 9, 7))
    assert line.shortened(7) == line
    assert Timeline.from_dict(short.as_dict()) == short


# What XLA really writes


def by_name(dumped):
    found = peak_values(dumped.ranges, dumped.assignment, dumped.program)
    assert [v.bytes for v in found] == sorted((v.bytes for v in found), reverse=True)
    names: dict[str, int] = {}
    for value in found:
        names[value.what] = names.get(value.what, 0) + value.bytes
    return names


def assert_state_is_whole(names, dumped):
    state = [size for name, size in names.items() if name.startswith("state")]
    assert sum(state) == pytest.approx(
        dumped.facts["memory"]["argument_bytes"], rel=0.02
    )
    assert names["state['params']"] == names["state['opt_state'][1][0].mu"]


def assert_timeline(dumped, names, accuracy):
    """Its largest moment is XLA's total and the peak's, but for gaps."""
    line = memory_timeline(dumped.ranges, dumped.assignment, dumped.program)
    memory = dumped.facts["memory"]
    assert set(line.live["arguments"]) == {memory["argument_bytes"]}
    assert sum(names.values()) <= max(line.total) <= memory["device_total_bytes"]
    made = max(line.total) - memory["argument_bytes"]
    outputs = memory["output_bytes"] - memory["alias_bytes"]
    assert made == pytest.approx(memory["temp_bytes"] + outputs, rel=accuracy)
    return line


def test_the_peak_of_a_cpu_step(cpu_steps):
    names = by_name(cpu_steps["full"])
    memory = cpu_steps["full"].facts["memory"]
    assert sum(names.values()) == pytest.approx(memory["device_total_bytes"], rel=0.05)
    assert_state_is_whole(names, cpu_steps["full"])
    layer_input = 2 * 128 * 128 * 4  # two sequences on each device, float32
    assert names["carry of the loop: Block/add"] == 4 * layer_input
    assert_timeline(cpu_steps["full"], names, accuracy=0.03)


def test_the_peak_of_gpu_steps(gpu_steps):
    for dumped in gpu_steps.values():
        names = by_name(dumped)
        memory = dumped.facts["memory"]
        # XLA's own figure includes host memory when something is offloaded.
        total = memory["device_total_bytes"]
        assert total * 0.95 < sum(names.values()) <= total
        assert_state_is_whole(names, dumped)
        line = assert_timeline(dumped, names, accuracy=0.03)
        recomputed = [phase == "recompute" for phase in line.running]
        assert any(recomputed) and line.running[-1] == "other"
        assert any(line.live["recompute"])
    layer_input = 4 * 128 * 256 * 2  # four layers, one sequence, bfloat16
    full, offloads = (by_name(dumped) for dumped in gpu_steps.values())
    assert full["carry of the loop: Block/add"] == layer_input
    assert "carry of the loop: Block/add" not in offloads
    assert sum(full.values()) == pytest.approx(
        gpu_steps["full"].facts["xla_peak"], rel=1e-3
    )
