"""Compiled programs read back: FLOPs, phases, traffic, against numbers by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxckpt.compiler.flops import PHASES, count_flops
from jaxckpt.compiler.hlo import parse_hlo
from jaxckpt.compiler.hlo_text import Shape
from jaxckpt.compiler.memory import compile_step
from jaxckpt.models.presets import model_config
from jaxckpt.training.config import TrainConfig
from jaxckpt.training.sharding import make_placement
from jaxckpt.training.step import make_program

pytestmark = pytest.mark.xdist_group("hlo")  # what is made once is shared


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


# Reading


@pytest.mark.parametrize(
    ("dtype", "dims", "nbytes"),
    [
        ("f32", (3, 5), 60),
        ("bf16", (), 2),
        ("pred", (7,), 7),
        ("s4", (5,), 3),
        ("f8e4m3fn", (6,), 6),
        ("c64", (2,), 16),
        ("f32", (4, 0), 0),
        ("token", (), 0),
    ],
)
def test_bytes_of_a_shape(dtype, dims, nbytes):
    assert Shape(dtype, dims).nbytes == nbytes


def test_an_instruction_is_read_in_full():
    program = entry(
        "%a.1 = f32[2,3]{1,0:T(8,128)S(5)} parameter(0)",
        "%b = (bf16[4]{0}, /*index=1*/u8[0]{0}) custom-call(%a.1, %a.1), "
        'custom_call_target="my$call", metadata={op_name="jit(f)/it\\\'s" '
        'source_file="/w/x.py" source_line=12}, backend_config={"k":[1]}',
    )
    argument, call = (running.instruction for running in program.instructions)
    assert argument.shapes == (Shape("f32", (2, 3), 5),)
    assert argument.shapes[0].on_host
    assert call.opcode == "custom-call" and call.custom_call_target == "my$call"
    assert call.shapes == (Shape("bf16", (4,)), Shape("u8", (0,)))
    assert call.operands == ("a.1", "a.1")
    assert call.op_name == "jit(f)/it's" and call.source == "/w/x.py:12"
    assert call.backend_config == {"k": [1]}
    assert program.module.num_devices == 8


def test_operands_are_read_with_types_and_without_percent_signs():
    program = entry(
        "a = f32[2]{0} parameter(0)",
        "b = f32[2]{0} negate(f32[2]{0} %a)",
        "c = f32[2]{0} add(a, b)",
        "d = pred[] constant(false)",
    )
    operands = [running.instruction.operands for running in program.instructions]
    assert operands == [(), ("a",), ("a", "b"), ()]


TABLES = """
FileNames
1 "/env/site-packages/flax/linen.py"
2 "/home/me/model.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=2 function_name_id=1 line=30 end_line=30 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=99 end_line=99 column=1 end_column=2}

StackFrames
"""


@pytest.mark.parametrize(
    "frames",
    [
        "1 {file_location_id=1 parent_frame_id=1}\n"  # the parent's number, plus one
        "2 {file_location_id=2 parent_frame_id=2}\n",
        "1 {file_location_id=1 parent_frame_id=0}\n"
        "2 {file_location_id=2 parent_frame_id=1}\n",
    ],
)
def test_source_lines_come_from_frames_outside_of_site_packages(frames):
    line = '%a = f32[] constant(1), metadata={op_name="x" stack_frame_id=2}'
    program = entry(line, before=TABLES + frames)
    assert program.instructions[0].instruction.source == "/home/me/model.py:30"


def test_source_lines_of_this_jax():
    program = compiled(lambda x, y: x @ y, shape(64, 64), shape(64, 64))
    sources = {running.instruction.source for running in program.instructions}
    assert any(__file__.rpartition("/")[2] in source for source in sources)


def test_other_text_is_refused():
    with pytest.raises(ValueError, match="not the text of an HLO module"):
        parse_hlo("module @jit_step {}")


# How often, and how many FLOPs

LOOPS = """
%inner (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %w = f32[8,8]{1,0} constant({...})
  %dot.in = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %dot.in)
}

%more (p.1: (s32[], f32[4,8])) -> pred[] {
  %p.1 = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %lt = pred[] constant(true)
}

%outer (q: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %q = (s32[], f32[4,8]{1,0}) parameter(0)
  ROOT %while.in = (s32[], f32[4,8]{1,0}) while(%q), condition=%more, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}

%fused (a: f32[4,8], b: f32[8,2]) -> f32[4,2] {
  %a = f32[4,8]{1,0} parameter(0)
  %b = f32[8,2]{1,0} parameter(1)
  ROOT %dot.f = f32[4,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%cheap (a.1: f32[4,8]) -> f32[4,8] {
  ROOT %a.1 = f32[4,8]{1,0} parameter(0)
}

%dear (a.2: f32[4,8]) -> f32[4,8] {
  %a.2 = f32[4,8]{1,0} parameter(0)
  %w.2 = f32[8,8]{1,0} constant({...})
  ROOT %dot.d = f32[4,8]{1,0} dot(%a.2, %w.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""  # noqa: E501


def test_loops_calls_branches_and_fusions_multiply():
    program = entry(
        "%s = (s32[], f32[4,8]{1,0}) parameter(0)",
        "%x = f32[4,8]{1,0} parameter(1)",
        "%w = f32[8,2]{1,0} parameter(2)",
        "%k = s32[] parameter(3)",
        "%while.out = (s32[], f32[4,8]{1,0}) while(%s), condition=%more, body=%outer, "
        'backend_config={"known_trip_count":{"n":"3"}}',
        "%called = f32[4,8]{1,0} call(%x), to_apply=%dear",
        "%if = f32[4,8]{1,0} conditional(%k, %x, %x), "
        "branch_computations={%cheap, %dear}",
        "%fusion = f32[4,2]{1,0} fusion(%x, %w), kind=kOutput, calls=%fused",
        before=LOOPS,
    )
    assert only(program, "dot.in").times == 3 * 5
    assert only(program, "lt").times == (3 + 1) + 3 * (5 + 1)
    assert only(program, "dot.d").times == 2  # the call, and the costliest branch
    names = {running.instruction.name for running in program.instructions}
    assert "dot.f" not in names and "a.1" not in names
    product = 2 * 4 * 8 * 8
    assert program.flops.total == 15 * product + 2 * product + 2 * 4 * 2 * 8
    assert program.unbounded_loops == program.flops.unbounded_loops == 0


def test_a_loop_of_unknown_length_counts_once_and_says_so():
    program = entry(
        "%s = (s32[], f32[4,8]{1,0}) parameter(0)",
        "%while.out = (s32[], f32[4,8]{1,0}) while(%s), condition=%more, body=%outer",
        before=LOOPS,
    )
    assert program.flops.total == 5 * 2 * 4 * 8 * 8
    assert program.unbounded_loops == 1


def test_nested_scans_that_xla_compiled():
    def inner(x, w):
        return jnp.tanh(x @ w), None

    def fn(x, ws):
        return lax.scan(lambda x, w: (lax.scan(inner, x, w)[0], None), x, ws)[0]

    program = compiled(fn, shape(4, 16), shape(30, 50, 16, 16))
    assert program.flops.total == 30 * 50 * 2 * 4 * 16 * 16


def test_batched_matmul_that_xla_compiled():
    def fn(a, b):
        return jnp.einsum("bhtd,bhsd->bhts", a, b)

    program = compiled(fn, shape(2, 3, 64, 32), shape(2, 3, 48, 32))
    assert program.flops.total == 2 * (2 * 3) * 64 * 48 * 32


def test_convolution_that_xla_compiled():
    def fn(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), "VALID")

    program = compiled(fn, shape(2, 3, 10, 10), shape(5, 3, 3, 3))
    assert program.flops.total == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


CONV = "window={size=3x3}, dim_labels=bf01_oi01->bf01, custom_call_target="
X, W, Y = "f32[2,3,10,10]{3,2,1,0}", "f32[5,3,3,3]{3,2,1,0}", "f32[2,5,8,8]{3,2,1,0}"


@pytest.mark.parametrize(
    ("target", "first", "second", "result"),
    [("Forward", X, W, Y), ("BackwardInput", Y, W, X), ("BackwardFilter", X, Y, W)],
)
def test_cudnn_convolutions_cost_their_forward(target, first, second, result):
    program = entry(
        f"%a = {first} parameter(0)",
        f"%b = {second} parameter(1)",
        f"%c = ({result}, u8[0]{{0}}) custom-call(%a, %b), "
        f'{CONV}"__cudnn$conv{target}"',
    )
    assert program.flops.total == 2 * (2 * 5 * 8 * 8) * (3 * 3 * 3)


def test_cublas_call():
    program = entry(
        "%a = bf16[8,4]{1,0} parameter(0)",
        "%b = bf16[8,16]{1,0} parameter(1)",
        "%c = (bf16[4,16]{1,0}, s8[99]{0}) custom-call(%a, %b), "
        'custom_call_target="__cublas$lt$matmul", backend_config={'
        '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"]}}}',
    )
    assert program.flops.total == 2 * 4 * 16 * 8


@pytest.mark.parametrize(
    ("target", "mask", "matmuls", "runs"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 2, 1),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 1, 1),
        ("__cudnn$fmhaSoftmaxBackward", "NO_MASK", 5, 0),
        ("__cudnn$fmhaSoftmaxBackward", "PADDING_CAUSAL", 2.5, 0),
    ],
)
def test_flash_attention(target, mask, matmuls, runs):
    program = entry(
        "%q = bf16[1,64,2,32]{3,2,1,0} parameter(0)",
        "%a = (bf16[1,2,64,32]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), "
        f'custom_call_target="{target}", backend_config={{"cudnn_fmha_backend_config":'
        '{"intermediate_tensor_shape":{"dimensions":["1","2","64","48"]},'
        f'"mask_type":"{mask}"}}}}',
    )
    assert program.flops.total == matmuls * 2 * (1 * 2 * 64 * 48) * 32
    assert program.attention_forward_runs == runs


# Phases


FORWARD = 'metadata={op_name="jit(s)/jvp(M)/mul"}'
RECOMPUTE = 'metadata={op_name="jit(s)/transpose(jvp(M))/rematted_computation/mul"}'
BACKWARD = 'metadata={op_name="jit(s)/transpose(jvp(M))/mul"}'


def phases(program):
    return {r.instruction.name: r.phase for r in program.instructions}


def test_a_fusion_takes_the_phase_of_its_matmul():
    fused = f"""
%fused (a: f32[4,8], b: f32[8,2]) -> f32[4,2] {{
  %a = f32[4,8]{{1,0}} parameter(0)
  %b = f32[8,2]{{1,0}} parameter(1)
  %d = f32[4,2]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {RECOMPUTE}
  ROOT %m = f32[4,2]{{1,0}} multiply(%d, %d), {BACKWARD}
}}
"""  # noqa: E501
    program = entry(
        "%x = f32[4,8]{1,0} parameter(0)",
        "%w = f32[8,2]{1,0} parameter(1)",
        f"%f = f32[4,2]{{1,0}} fusion(%x, %w), kind=kLoop, calls=%fused, {BACKWARD}",
        before=fused,
    )
    assert phases(program)["f"] == "recompute"
    assert program.flops.recompute == program.flops.total == 2 * 4 * 2 * 8


def test_a_fusion_without_a_name_takes_its_largest_named_part():
    fused = f"""
%fused (a: f32[4,8]) -> f32[4] {{
  %a = f32[4,8]{{1,0}} parameter(0), metadata={{op_name="state['params']"}}
  %m = f32[4,8]{{1,0}} multiply(%a, %a), {FORWARD}
  ROOT %s = f32[4]{{0}} slice(%m), {BACKWARD}
}}
"""
    call = "%f = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused"
    program = entry("%x = f32[4,8]{1,0} parameter(0)", call, before=fused)
    assert phases(program)["f"] == "forward"


def test_nameless_instructions_ask_those_they_serve():
    program = entry(
        f"%x = f32[8]{{0}} constant({{...}}), {FORWARD}",
        f"%f = f32[8]{{0}} negate(%x), {FORWARD}",
        "%copied = f32[8]{0} copy(%f)",  # for its user
        f"%b = f32[8]{{0}} negate(%copied), {BACKWARD}",
        "%sum = f32[8]{0} all-reduce-start(%b), replica_groups={{0,1}}, to_apply=%add",
        "%done = f32[8]{0} all-reduce-done(%sum)",  # both for what they reduce
        "%arg = f32[8]{0} copy(%done), metadata={op_name=\"state['params']\"}",
        'ROOT %u = f32[8]{0} add(%arg, %arg), metadata={op_name="jit(s)/add"}'[5:],
    )
    found = phases(program)
    assert found["copied"] == "backward"
    assert found["sum"] == found["done"] == "backward"
    assert found["arg"] == "other"
    assert found["x"] == "other"  # constants and arguments have no phase of their own


def test_what_nothing_names_has_the_phase_of_the_loop_around_it():
    program = entry(
        "%s = (s32[], f32[4,8]{1,0}) parameter(0)",
        "%loop = (s32[], f32[4,8]{1,0}) while(%s), condition=%more, body=%inner, "
        f'{FORWARD}, backend_config={{"known_trip_count":{{"n":"3"}}}}',
        before=LOOPS,
    )
    assert phases(program)["dot.in"] == "forward"
    assert program.flops.forward == program.flops.total == 3 * 2 * 4 * 8 * 8


def test_a_gather_is_of_the_phase_that_first_computes_with_it():
    fused = """
%cast (a: f32[8]) -> bf16[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %c = bf16[8]{0} convert(%a)
}
"""
    program = entry(
        "%w = f32[1]{0} parameter(0)",
        f"%s = (f32[1]{{0}}, f32[8]{{0}}) all-gather-start(%w), {BACKWARD}",
        f"%d = f32[8]{{0}} all-gather-done(%s), {BACKWARD}",
        f"%f = bf16[8]{{0}} fusion(%d), kind=kLoop, calls=%cast, {BACKWARD}",
        f"%again = bf16[8]{{0}} negate(%f), {RECOMPUTE}",
        f"%back = bf16[8]{{0}} multiply(%f, %again), {BACKWARD}",
        before=fused,
    )
    assert phases(program)["s"] == "recompute"
    assert phases(program)["back"] == "backward"


# Whole steps


def step_counts(policy, devices):
    model = model_config("tiny", attention="xla")
    config = TrainConfig(policy=policy, architecture=model, batch_size=8, seq_len=64)
    placement = make_placement({"fsdp": devices}, jax.devices()[:devices])
    program = make_program(config, placement)
    arguments = (program.state, program.batch)
    step, _ = compile_step(program.step, *arguments, platform="cpu")
    return parse_hlo(step.as_text()), count_flops(program.step, *arguments)


@pytest.mark.parametrize(
    ("policy", "devices"),
    [("full", 1), ("none", 4), ("full", 4), ("dots_saveable", 4)],
)
def test_a_training_step_agrees_with_its_jaxpr(policy, devices):
    program, jaxpr = step_counts(policy, devices)
    for phase in PHASES:
        expected = getattr(jaxpr, phase) / devices
        assert getattr(program.flops, phase) == pytest.approx(expected, rel=0.01), phase
    assert (program.flops.recompute > 0) == (policy == "full")
    sent = {phase: sum(program.collective_bytes[phase].values()) for phase in PHASES}
    assert (sent["forward"] > 0) == (sent["backward"] > 0) == (devices > 1)
    # Gathering weights again is what full remat under fsdp costs beside FLOPs.
    if policy != "dots_saveable":
        assert (sent["recompute"] > 0) == (policy == "full" and devices > 1)


def test_a_gpu_step_agrees_with_its_jaxpr(gpu_steps):
    for dumped in gpu_steps.values():
        counted = dataclasses.asdict(dumped.program.flops)
        for phase in PHASES:
            expected = dumped.facts["flops"][phase] / 8
            assert counted[phase] == pytest.approx(expected, rel=0.01), phase


def test_flash_attention_runs_once_only_where_its_context_is_saved(gpu_steps):
    runs = [dumped.program.attention_forward_runs for dumped in gpu_steps.values()]
    layers = gpu_steps["full"].facts["layers"]
    assert runs == [2 * layers, layers]


def test_offloading_moves_each_layers_input_out_and_back(gpu_steps):
    stays, offloads = (d.program.host_transfer_bytes for d in gpu_steps.values())
    layer_input = 2 * 128 * 256  # bfloat16, one sequence, dim
    layers = gpu_steps["full"].facts["layers"]
    assert sum(stays.values()) == 0
    assert offloads["forward"] == layers * layer_input
    assert offloads["backward"] + offloads["recompute"] == layers * layer_input


def test_full_remat_gathers_weights_again_on_gpus(gpu_steps):
    """XLA joins a small layer's gathers; the last matmul's, only for backward, too."""
    sent = gpu_steps["full"].program.collective_bytes
    layers, dim, mlp_dim = gpu_steps["full"].facts["layers"], 256, 512
    weights = 2 * (4 * dim * dim + 3 * dim * mlp_dim)
    assert sent["recompute"] == {"all-gather": layers * weights * 7 // 8}
    assert sent["backward"]["reduce-scatter"] > 0
