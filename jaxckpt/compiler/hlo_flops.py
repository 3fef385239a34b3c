"""FLOPs of one compiled instruction, counted from its shapes.

The same rules as `jaxckpt.compiler.flops`, for what the compiler made of the matmuls:
dots in fusions, calls of cuBLAS, oneDNN and cuDNN, convolutions and their gradients.
"""

import math

from jaxckpt.compiler.hlo_text import HloModule, Instruction

FLASH = "__cudnn$fmha"  # how cuDNN's attention kernels' names begin


def instruction_flops(module: HloModule, instruction: Instruction) -> int:
    """Counted: FLOPs of one run on one device, a fusion's contents included."""
    return sum(_own_flops(module, inner) for inner in module.inside(instruction))


def is_attention_forward(instruction: Instruction) -> bool:
    """Whether this is cuDNN's flash-attention forward kernel."""
    target = instruction.custom_call_target
    return target.startswith(FLASH) and "Backward" not in target


def _own_flops(module: HloModule, instruction: Instruction) -> int:
    config = instruction.backend_config
    target = instruction.custom_call_target
    if instruction.opcode == "dot":
        lhs = module.operand_shapes(instruction)[0]
        depth = instruction.numbers("lhs_contracting_dims")
        return 2 * instruction.shapes[0].size * math.prod(lhs.dims[d] for d in depth)
    if instruction.opcode == "convolution" or target.startswith("__cudnn$conv"):
        return _convolution_flops(module, instruction)
    if target.startswith(FLASH):
        return _attention_flops(module, instruction)
    if target.startswith("__cublas$"):
        numbers = config["gemm_backend_config"]["dot_dimension_numbers"]
        lhs = module.operand_shapes(instruction)[0]
        depth = numbers["lhs_contracting_dimensions"]
        contracted = math.prod(lhs.dims[int(d)] for d in depth)
        return 2 * instruction.shapes[0].size * contracted
    if target.startswith("__onednn$matmul"):
        lhs = module.operand_shapes(instruction)[0]
        return 2 * instruction.shapes[0].size * lhs.dims[-1]
    return 0


def _convolution_flops(module: HloModule, instruction: Instruction) -> int:
    """Two per multiply-add of the forward convolution, whichever gradient it is."""
    target = instruction.custom_call_target
    first, second = module.operand_shapes(instruction)[:2]
    output, kernel = instruction.shapes[0], second
    if target.endswith("BackwardInput"):
        output = first
    elif target.endswith("BackwardFilter"):
        output, kernel = second, instruction.shapes[0]
    labels = instruction.attributes.partition("dim_labels=")[2].split(",")[0]
    outputs = kernel.dims[labels.split("_")[1].split("->")[0].index("o")]
    return 2 * output.size * kernel.size // outputs


def _attention_flops(module: HloModule, instruction: Instruction) -> int:
    """Flash attention: 2 matmuls forward, 5 backward; causal masks skip half."""
    config = instruction.backend_config["cudnn_fmha_backend_config"]
    scores = [int(d) for d in config["intermediate_tensor_shape"]["dimensions"]]
    matmuls = 5 if "Backward" in instruction.custom_call_target else 2
    head_dim = module.operand_shapes(instruction)[0].dims[-1]
    flops = 2 * matmuls * math.prod(scores) * head_dim
    return flops // 2 if "CAUSAL" in config.get("mask_type", "") else flops
