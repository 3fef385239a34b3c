"""A stack of equal layers as the planner's model: which layers keep what.

Four shapes of plan, each for what the one before does not fit. *Mixed*: every layer is
checkpointed under one of at most two choices of its frontier
(`jaxckpt.planner.frontier.mix`). Where the layers' inputs alone are too much, equal
*groups* of layers, of the first ones or all; then *groups of groups*; then *nested*
groups of any size, by rotor's recurrence with the frontier as options: these are no
loops, which XLA compiles slowly and orders as it likes.

No JAX here.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxckpt.layers import LayerPlan, Run
from jaxckpt.planner.frontier import Mix, frontier, mix, stack_bound
from jaxckpt.planner.search import Proposal
from jaxckpt.planner.solve import Choice, Infeasible, Link, Operation
from jaxckpt.policies import FULL, NONE, Policy
from jaxckpt.schedules import (
    Chain,
    Checkpointed,
    NoSchedule,
    Option,
    Schedule,
    Stage,
    StageCosts,
    least_memory,
    rotor_schedule,
)
from jaxckpt.schedules.runs import runs_of
from jaxckpt.schedules.simulate import simulate

_OPTIONS = 6  # of the frontier, given to rotor
_SLOTS = 200
_DEPTH = 8  # of groups in groups: Python's stack is used up by some 20
_MIXED, _GROUPS, _GROUPS_OF_GROUPS, _NESTED = range(4)  # shapes of plans


@dataclass(frozen=True)
class LayerStack:
    """A training step with a stack of equal layers, as the planner sees it.

    Every number of bytes is of one device.

    Attributes:
      operations: one layer's graph.
      num_layers: depth.
      static: what is there whatever the plan keeps, by name: weights, optimizer
        state, batch.
      gradient_bytes: gradients of all weights. XLA allocates those of a scan before
        its backward loop, so they are all there at the peak.
      input_bytes: one layer's input, and what it keeps whatever its policy. A
        checkpointed layer keeps it if its backward pass, or what is run again, reads
        it.
      input_name: the name it has in the layer, under which it may be offloaded; ""
        where it has none, and always stays.
      forward_seconds, forward_flops: of one layer's forward pass; estimated, counted.
      link: the way to host memory; None forbids offloading.
      host_budget: bytes of host memory.
      layer_bytes: of one layer's weights. Each layer of a group has copies of them
        and of their gradients, while its group runs backward.
      iterations: how often a device runs these layers in a step, keeping what they
        save of all runs: in a pipeline, where they are the layers of one chunk.
      stages: devices that do so at once, each with layers of its own.
    """

    operations: Sequence[Operation]
    num_layers: int
    static: dict[str, int]
    gradient_bytes: int
    input_bytes: int
    forward_seconds: float
    forward_flops: int = 0
    input_name: str = ""
    link: Link | None = None
    host_budget: float = math.inf
    layer_bytes: int = 0
    iterations: int = 1
    stages: int = 1

    @property
    def fixed_bytes(self) -> int:
        return sum(self.static.values()) + self.gradient_bytes

    @functools.cached_property
    def choices(self) -> list[Choice]:
        """The frontier of one layer."""
        found = frontier(
            self._operations,
            copies=self.num_layers * self.iterations,
            link=self.link,
            host_budget=self.host_budget,
        )
        return [choice for choice in found if choice.cost < self._impossible]

    @functools.cached_property
    def _operations(self) -> Sequence[Operation]:
        """The layer's graph, where its named input is a value like any other, but for
        that it cannot be run again."""
        return [
            replace(one, cost=self._impossible, nbytes=self.input_bytes, keep_cost=0.0)
            if self.input_name and one.name == self.input_name
            else one
            for one in self.operations
        ]

    @property
    def _impossible(self) -> float:
        return 1e3 * self.forward_seconds or 1.0  # seconds; views alone take none

    @property
    def cheapest(self) -> float:
        runs = self.num_layers * self.iterations
        return runs * min(choice.cost for choice in self.choices)

    @property
    def gap(self) -> float:
        return max(choice.gap for choice in self.choices)

    @property
    def shapes(self) -> int:
        return 1 + _NESTED

    def propose(self, allowance: float, shape: int) -> Proposal:
        """The cheapest of a shape; no offloading in groups, which XLA:GPU does not
        nest."""
        if shape == _MIXED:
            mixed = mix(
                self.choices,
                self.num_layers,
                allowance - self._inputs,
                host_budget=self.host_budget,
                iterations=self.iterations,
            )
            return self._mixed(mixed)
        if not self._usable:
            raise Infeasible("no choice without offloading to make groups of")
        if shape == _NESTED:
            return self._proposal(shallow_schedule(self._chain, allowance, _SLOTS))
        fits = [one for one in self._of_shape(shape) if one.memory <= allowance]
        if not fits:
            raise Infeasible("no equal groups fit")
        return min(fits, key=lambda one: (one.cost, one.memory))

    def smallest(self, shape: int) -> list[Proposal]:
        """The one or two of least memory, if the shape has any."""
        if shape == _MIXED:
            least = min(self.choices, key=lambda one: (one.saved_bytes, one.cost))
            return [self.uniform(least)]
        if not self._usable:
            return []
        if shape == _NESTED:
            memory = least_memory(self._chain)
            for more in (1.02, 1.1, 1.3, 1.6):  # slots round up; not too deep
                with contextlib.suppress(Infeasible):
                    return [self.propose(memory * more + 1, shape)]
            return []
        return sorted(self._of_shape(shape), key=lambda one: (one.memory, one.cost))[:2]

    def cheapest_within(self, allowance: float) -> Proposal:
        """The cheapest proposal of the first shape that has one.

        Raises:
          Infeasible: none has.
        """
        for shape in range(self.shapes - 1):
            with contextlib.suppress(Infeasible):
                return self.propose(allowance, shape)
        return self.propose(allowance, _NESTED)

    def lower_bound(self, allowance: float) -> float:
        room = allowance - self._inputs
        try:
            return stack_bound(
                self._operations,
                self.num_layers * self.iterations,
                room,
                link=self.link,
                host_budget=self.host_budget,
            )
        except Infeasible:
            return 0.0  # groups alone go below one input per layer

    @property
    def _inputs(self) -> int:
        """Bytes of inputs that are not among what the choices keep."""
        runs = self.num_layers * self.iterations
        return 0 if self.input_name else runs * self.input_bytes

    def _beside(self, choice: Choice) -> int:
        """Bytes of the input, where it is not among what a choice saves."""
        return 0 if self.input_name in choice.save else self.input_bytes

    def uniform(self, choice: Choice) -> Proposal:
        """Every layer under one choice."""
        runs = self.num_layers * self.iterations
        cost, memory = runs * choice.cost, float(choice.memory(runs))
        return self._mixed(Mix(choice, choice, (self.num_layers, 0), cost, memory))

    def _mixed(self, mixed: Mix) -> Proposal:
        runs = [
            Run(count, policy_of(choice, self.input_name))
            for choice, count in mixed.parts
        ]
        return Proposal(
            layer_plan=str(LayerPlan(tuple(runs))),
            memory=self._inputs + mixed.memory,
            cost=mixed.cost,
            flops=mixed.flops * self.iterations * self.stages,
            exposed_seconds=self.iterations
            * sum(count * choice.exposed_seconds for choice, count in mixed.parts),
            offloaded_bytes=self.iterations
            * sum(count * choice.offloaded_bytes for choice, count in mixed.parts),
        )

    def _of_shape(self, shape: int) -> list[Proposal]:
        return self._groups if shape == _GROUPS else self._groups_of_groups

    @functools.cached_property
    def _groups(self) -> list[Proposal]:
        """Equal groups of layers under one choice, which compile to scans in a scan:
        of some first layers or all."""
        layers = self.num_layers
        found = []
        for k in (*range(min(3, len(self._usable))), len(self._usable)):
            flat = [Stage(index, k) for index in range(layers)]
            for size in self._group_sizes:
                for end in range(layers - layers % size, size, -size):
                    items = (*grouped(flat[:end], size).items, *flat[end:])
                    memory = self._loops(end // size, size, layers - end, k)
                    found.append(self._proposal(Schedule(items), _GROUPS, memory))
        return found

    @functools.cached_property
    def _groups_of_groups(self) -> list[Proposal]:
        """Equal groups of equal groups, each layer keeping the least."""
        layers = self.num_layers
        flat = [Stage(index, 0) for index in range(layers)]
        return [
            self._proposal(
                regrouped(flat, size, inner),
                _GROUPS_OF_GROUPS,
                self._loops(layers // size + size // inner, inner, 0, 0),
            )
            for size in self._group_sizes
            if layers % size == 0
            for inner in range(2, size // 2 + 1)
            if size % inner == 0
        ]

    def _loops(self, inputs: int, size: int, rest: int, option: int) -> int:
        """Peak bytes of scans in scans: XLA allots what a scan stacks whole, so it is
        the inputs of all groups that a loop goes through, and what the layers of one
        group, or the rest in none, keep."""
        one = self._chain.stages[0].options[option]
        group = size * (one.kept + 2 * self.layer_bytes)
        held = max(group, rest * one.kept)
        return inputs * self.input_bytes + held + one.backward_temporary

    @property
    def _group_sizes(self) -> list[int]:
        """One group of all layers gains something only beside other iterations."""
        sizes = [*range(2, self.num_layers // 2 + 1)]
        return [*sizes, self.num_layers] if self.iterations > 1 else sizes

    @functools.cached_property
    def _usable(self) -> list[Choice]:
        """Choices for layers in groups, the smallest one first."""
        on_device = [one for one in self.choices if not one.offload]
        return on_device[:: -(-len(on_device) // _OPTIONS) or 1]

    @functools.cached_property
    def _chain(self) -> Chain:
        options = tuple(
            Option(
                kept=choice.saved_bytes + self._beside(choice),
                forward=self.forward_seconds,
                backward=2 * self.forward_seconds + choice.cost,
                backward_temporary=choice.working_bytes,
            )
            for choice in self._usable
        )
        everything = Option(
            kept=sum(one.nbytes for one in self.operations if one.needed)
            + self.input_bytes,
            forward=self.forward_seconds,
            backward=2 * self.forward_seconds,
        )
        options = (*options, everything)  # a layer of a group without remat
        # Gradients that go from layer to layer are not counted, as in `stack_memory`.
        layer = StageCosts(self.input_bytes, self.forward_seconds, options, gradient=0)
        return Chain((layer,) * self.num_layers, input=self.input_bytes)

    def _proposal(
        self, schedule: Schedule, shape: int = _NESTED, memory: int | None = None
    ) -> Proposal:
        """Of rotor's schedules the memory is the simulated one."""
        usable = [policy_of(one, self.input_name) for one in self._usable]
        policies = [[*usable, NONE]] * self.num_layers
        flops = [*(one.flops for one in self._usable), 0]
        simulated = simulate(schedule, self._chain)
        plain = 3 * self.num_layers * self.forward_seconds
        again = sum(
            flops[stage.option] for stage in schedule.stages()
        ) + self.forward_flops * (sum(simulated.forward_runs) - self.num_layers)
        held = sum(
            self.input_bytes
            if isinstance(item, Checkpointed)
            else self._chain.stages[item.index].options[item.option].kept
            for item in schedule.items
        )
        return Proposal(
            layer_plan=str(LayerPlan(runs_of(schedule.items, policies))),
            memory=float(
                (simulated.peak if memory is None else memory)
                + (self.iterations - 1) * held
            ),
            cost=(simulated.time - plain) * self.iterations,
            flops=again * self.iterations * self.stages,
            shape=shape,
        )


def grouped(stages: Sequence[Stage], size: int) -> Schedule:
    """Checkpointed groups of so many stages, the last one smaller.

    Example:
      >>> grouped([Stage(index) for index in range(5)], size=2)
      Schedule('[0 1] [2 3] [4]')
    """
    starts = range(0, len(stages), size)
    return Schedule(tuple(Checkpointed(tuple(stages[at : at + size])) for at in starts))


def regrouped(stages: Sequence[Stage], size: int, inner: int) -> Schedule:
    """Groups of ``size`` stages made of groups of ``inner`` stages.

    Example:
      >>> regrouped([Stage(index) for index in range(8)], size=4, inner=2)
      Schedule('[[0 1] [2 3]] [[4 5] [6 7]]')
    """
    groups = grouped(stages, inner).items
    each = size // inner
    return Schedule(
        tuple(
            Checkpointed(groups[at : at + each]) for at in range(0, len(groups), each)
        )
    )


def shallow_schedule(chain: Chain, allowance: float, slots: int) -> Schedule:
    """Rotor's schedule, where its groups are not nested too deep to be traced.

    Raises:
      Infeasible: there is none.
    """
    try:
        schedule = rotor_schedule(chain, max(0, int(allowance)), slots)
    except NoSchedule as error:
        raise Infeasible(str(error)) from error
    if schedule.depth > _DEPTH:
        raise Infeasible(f"groups would be {schedule.depth} deep, {_DEPTH} at most")
    return schedule


def policy_of(choice: Choice, input_name: str = "") -> Policy:
    """A choice in the policy language; a layer's input stays without being named."""
    save = tuple(name for name in choice.save if name != input_name)
    if not save and not choice.offload:
        return FULL
    return Policy(save=save, offload=choice.offload)
