"""Estimated seconds of a step, by hand on small programs and on one that XLA costed."""

import dataclasses

import pytest

from jaxckpt.compiler.hlo import parse_hlo
from jaxckpt.compiler.schedule import estimate_step_seconds, touched_bytes
from jaxckpt.compiler.targets import KINDS

# Round figures, so that seconds can be read off.
KIND = dataclasses.replace(
    KINDS["h100"],
    matmul_flops=1e12,
    memory_bandwidth=1e9,
    link_bandwidth=1e8,
    host_bandwidth=1e7,
    network_bandwidth=2e7,
)
FORWARD = 'metadata={op_name="jit(s)/jvp(M)/mul"}'
BACKWARD = 'metadata={op_name="jit(s)/transpose(jvp(M))/mul"}'


def sol(microseconds):
    other = '{"exec_time_us":9e9,"name":""}'
    cost = f'{{"exec_time_us":{microseconds},"name":"sol"}}'
    return f'backend_config={{"reification_cost":[{other},{cost}]}}'


def program(*lines, before=""):
    *body, root = lines
    text = "\n".join(f"  {line}" for line in [*body, f"ROOT {root}"])
    header = "HloModule jit_step, is_scheduled=true, num_partitions=8"
    return parse_hlo(f"{header}\n{before}\nENTRY %main () -> f32[] {{\n{text}\n}}\n")


def estimate(*lines, before="", hosts=1, gpus=8, kind=KIND):
    return estimate_step_seconds(program(*lines, before=before), kind, hosts, gpus)


X = "%x = f32[1000]{0} parameter(0)"
DOT_INPUTS = (
    "%a = bf16[100,1000]{1,0} parameter(0)",
    "%b = bf16[1000,100]{1,0} parameter(1)",
)
DOT = "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
DOT_FLOPS = 2 * 100 * 100 * 1000


def test_xlas_speed_of_light_is_taken_where_it_is():
    found = estimate(X, f"%y = f32[1000]{{0}} negate(%x), {FORWARD}, {sol(7.5)}")
    assert found.phases["forward"].memory_seconds == pytest.approx(7.5e-6)
    assert found.seconds == pytest.approx(7.5e-6)
    assert found.from_xla == 1.0 and found.bound == "memory"


def test_without_it_the_roofline_is():
    found = estimate(X, f"%y = f32[1000]{{0}} negate(%x), {FORWARD}")
    assert found.phases["forward"].memory_seconds == pytest.approx(8000 / 1e9)
    assert found.from_xla == 0.0
    kind = dataclasses.replace(KIND, memory_bandwidth=1e15)
    found = estimate(*DOT_INPUTS, f"%y = bf16[100,100]{{1,0}} {DOT}", kind=kind)
    assert found.phases["other"].compute_seconds == pytest.approx(DOT_FLOPS / 1e12)
    assert found.phases["other"].memory_seconds == 0.0
    assert found.bound == "compute"


def test_loops_multiply():
    loop = f"""
%body (p: (s32[], f32[1000])) -> (s32[], f32[1000]) {{
  %p = (s32[], f32[1000]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[1000]{{0}} get-tuple-element(%p), index=1
  %w = f32[1000]{{0}} negate(%v), {BACKWARD}, {sol(2)}
  ROOT %t = (s32[], f32[1000]{{0}}) tuple(%i, %w)
}}

%more (q: (s32[], f32[1000])) -> pred[] {{
  %q = (s32[], f32[1000]{{0}}) parameter(0)
  ROOT %c = pred[] constant(true)
}}
"""
    found = estimate(
        "%s = (s32[], f32[1000]{0}) parameter(0)",
        "%l = (s32[], f32[1000]{0}) while(%s), condition=%more, body=%body, "
        'backend_config={"known_trip_count":{"n":"32"}}',
        before=loop,
    )
    assert found.seconds == pytest.approx(32 * 2e-6)
    assert found.phases["backward"].memory_seconds == pytest.approx(32 * 2e-6)


@pytest.mark.parametrize(
    ("dtype", "said", "expected"),
    [
        ("bf16", 1.5, 1.5),  # the peak allows 1.0
        ("bf16", 11.0, 1.0),  # charged as if on ordinary cores
        ("bf16", 0.5, 1.0),  # faster than the kind's own peak
        ("f32", 5.0, 5.0),  # TF32 runs at half the peak: 2.0
        ("f32", 1.5, 2.0),
        ("f8e4m3fn", 0.1, 0.5),
    ],
)
def test_figures_for_matmuls_are_checked_against_the_peak(dtype, said, expected):
    kind = dataclasses.replace(KIND, memory_bandwidth=1e18)
    unit = DOT_FLOPS / 1e12
    lines = [line.replace("bf16", dtype) for line in DOT_INPUTS]
    result = f"%y = f32[100,100]{{1,0}} {DOT}, {sol(1e6 * said * unit)}"
    found = estimate(*lines, result, kind=kind)
    assert found.seconds == pytest.approx(expected * unit)


def test_float32_without_tf32_runs_on_ordinary_cores():
    kind = dataclasses.replace(
        KINDS["t4"], cores=10, fpus_per_core=50, clock_ghz=1.0, memory_bandwidth=1e18
    )
    lines = [line.replace("bf16", "f32") for line in DOT_INPUTS]
    found = estimate(*lines, f"%y = f32[100,100]{{1,0}} {DOT}", kind=kind)
    assert found.seconds == pytest.approx(DOT_FLOPS / (2 * 10 * 50 * 1e9))


GATHER = "replica_groups=[1,8]<=[8], dimensions={0}"
SENT = 7 * 4000  # of eight parts of 1000 float32


def test_asynchronous_collectives_hide_behind_compute_of_their_phase():
    gather = (
        X,
        "%s = (f32[1000]{0}, f32[8000]{0}) all-gather-start(%x), "
        f"{GATHER}, {FORWARD}",
        f"%d = f32[8000]{{0}} all-gather-done(%s), {FORWARD}",
    )
    for compute, expected in [(100, SENT / 1e8), (5000, 5e-3)]:
        work = f"%y = f32[1000]{{0}} negate(%x), {FORWARD}, {sol(compute)}"
        found = estimate(*gather, work)
        assert found.phases["forward"].link_seconds == pytest.approx(SENT / 1e8)
        assert found.seconds == pytest.approx(expected)
    elsewhere = f"%y = f32[1000]{{0}} negate(%x), {BACKWARD}, {sol(100)}"
    assert estimate(*gather, elsewhere).seconds == pytest.approx(SENT / 1e8 + 1e-4)
    assert estimate(*gather, elsewhere).bound == "link"


def test_synchronous_collectives_add_to_compute():
    config = f'{sol(100)[:-1]},"collective_backend_config":{{"is_sync":true}}}}'
    for gather in [
        f"%g = f32[8000]{{0}} all-gather(%x), {GATHER}, {FORWARD}",
        "%g = (f32[1000]{0}, f32[8000]{0}) all-gather-start(%x), "
        f"{GATHER}, {FORWARD}, {config}",
    ]:
        work = f"%y = f32[1000]{{0}} negate(%x), {FORWARD}, {sol(100)}"
        assert estimate(X, gather, work).seconds == pytest.approx(SENT / 1e8 + 1e-4)


@pytest.mark.parametrize(
    ("call", "hosts", "gpus", "rate"),
    [
        ("all-gather(%x), replica_groups=[1,8]<=[8]", 1, 8, 1e8),
        ("all-gather(%x), replica_groups=[1,8]<=[8]", 2, 4, 4 * 2e7),  # four cards
        ("all-gather(%x), replica_groups=[1,8]<=[8]", 8, 1, 2e7),
        ("all-gather(%x), replica_groups=[2,4]<=[8]", 2, 4, 1e8),  # within hosts
        ("all-gather(%x), replica_groups=[4,2]<=[2,4]T(1,0)", 2, 4, 2e7),
        ("all-to-all(%x), replica_groups=[1,8]<=[8]", 2, 4, 2e7),
    ],
)
def test_collectives_between_hosts_take_the_network(call, hosts, gpus, rate):
    lines = (X, f"%g = f32[8000]{{0}} {call}, dimensions={{0}}")
    parsed = program(*lines)
    sent = parsed.sent_bytes(parsed.instructions[-1].instruction)
    found = estimate(*lines, hosts=hosts, gpus=gpus)
    assert found.seconds == pytest.approx(sent / rate)


def test_host_copies_take_the_host_link():
    found = estimate(X, f"%h = f32[1000]{{0:S(5)}} copy(%x), {FORWARD}, {sol(1)}")
    assert found.seconds == found.phases["forward"].link_seconds
    assert found.seconds == pytest.approx(4000 / 1e7)


def test_host_copies_and_collectives_hide_behind_each_other():
    found = estimate(
        X,
        "%s = (f32[1000]{0}, f32[8000]{0}) all-gather-start(%x), "
        f"{GATHER}, {FORWARD}",
        "%h = (f32[1000]{0:S(5)}, f32[1000]{0}, u32[]) copy-start(%x), " + FORWARD,
        f"%d = f32[1000]{{0:S(5)}} copy-done(%h), {FORWARD}",
    )
    host, gpus = 4000 / 1e7, SENT / 1e8
    assert found.seconds == pytest.approx(max(host, gpus))
    assert found.phases["forward"].link_seconds == pytest.approx(host + gpus)


FUSED_UPDATE = """
%update (s: f32[30,10], v: f32[30,10], j: s32[]) -> f32[30,10] {
  %s = f32[30,10]{1,0} parameter(0)
  %v = f32[30,10]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %flat = f32[300]{0} bitcast(%v)
  %part = f32[10]{0} slice(%flat), slice={[0:10]}
  %one = f32[1,10]{1,0} bitcast(%part)
  ROOT %dus = f32[30,10]{1,0} dynamic-update-slice(%s, %one, %j, %j)
}
"""


def test_slices_and_updates_in_place_touch_only_their_part():
    parsed = program(
        "%s = f32[30,10]{1,0} parameter(0)",
        "%v = f32[30,10]{1,0} parameter(1)",
        "%i = s32[] parameter(2)",
        "%f = f32[30,10]{1,0} fusion(%s, %v, %i), kind=kLoop, calls=%update",
        "%d = f32[1,10]{1,0} dynamic-slice(%f, %i, %i), dynamic_slice_sizes={1,10}",
        before=FUSED_UPDATE,
    )
    touched = {
        running.instruction.name: touched_bytes(parsed, running.instruction)
        for running in parsed.instructions
    }
    assert touched["f"] == 40 + 4 + 40  # the slice read, the index, the slice written
    assert touched["d"] == 40 + 4 + 4 + 40


def test_an_empty_program_takes_no_time():
    found = estimate(X)
    assert found.seconds == 0.0 and found.from_xla == 0.0


def test_a_step_that_xla_costed(gpu_steps):
    full = gpu_steps["full"]
    found = estimate_step_seconds(full.program, KINDS["h100"], 1, 8)
    least = full.program.flops.total / KINDS["h100"].matmul_flops
    assert least < found.seconds < 50 * least  # a tiny step is bound by memory
    assert found.bound == "memory"
    assert found.from_xla > 0.5
    assert all(phase.seconds > 0 for phase in found.phases.values())
    slower = estimate_step_seconds(full.program, KINDS["h100"], 8, 1)
    assert slower.seconds > found.seconds  # the same groups, over the network
