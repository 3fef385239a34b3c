"""The search without JAX: a fake compiler that differs from the model in known ways."""

import random

import pytest

from jaxckpt.planner.search import PlanError, Proposal, check_static, search
from jaxckpt.planner.solve import Infeasible

STATIC = {"weights": 300, "batch": 100}
FIXED = 500


class Ladder:
    """Proposals 0, 1, ... of memory 20 i + 10 and of falling cost; the last is free."""

    static = STATIC
    fixed_bytes = FIXED
    cheapest = 0.0
    gap = 0.0
    shapes = 1

    def __init__(self, rungs: int = 51, small: tuple[Proposal, ...] = ()):
        self.rungs = [
            Proposal(f"{i + 1}xfull", 20 * i + 10, float(rungs - 1 - i), flops=i)
            for i in range(rungs)
        ]
        self.small = small

    def propose(self, allowance, shape=0):
        fits = [one for one in self.rungs if one.memory <= allowance]
        if not fits:
            raise Infeasible("nothing fits")
        return min(fits, key=lambda one: one.cost)

    def smallest(self, shape=0):
        return [self.rungs[0], *self.small]

    def lower_bound(self, allowance):
        return self.propose(max(allowance, self.rungs[0].memory)).cost

    def find(self, text):
        return next(p for p in (*self.rungs, *self.small) if p.layer_plan == text)


def row_of(total):
    return {
        "device_total_bytes": total,
        "argument_bytes": 400,
        "temp_bytes": total - FIXED,
    }


class Compiler:
    """Model memory times ``scale`` plus ``offset`` plus noise; counts its calls."""

    def __init__(self, model, scale=1.0, offset=0, noise=0, special=()):
        self.model, self.scale, self.offset, self.noise = model, scale, offset, noise
        self.special = dict(special)
        self.calls = []

    def total(self, text):
        if text in self.special:
            return self.special[text]
        shake = random.Random(text).randint(-self.noise, self.noise)
        memory = self.model.find(text).memory
        return FIXED + round(self.scale * memory) + self.offset + shake

    def __call__(self, text):
        self.calls.append(text)
        return row_of(self.total(text))


@pytest.mark.parametrize("budget", range(600, 1600, 83))
@pytest.mark.parametrize(
    "bias",
    [
        {},
        {"offset": 60},
        {"offset": -60},
        {"scale": 1.3},
        {"scale": 0.7},
        {"scale": 1.1, "offset": -30, "noise": 8},
    ],
    ids=str,
)
def test_converges_and_never_answers_over_budget(budget, bias):
    model = Ladder()
    compiler = Compiler(model, **bias)
    best_possible = min(
        one.cost for one in model.rungs if compiler.total(one.layer_plan) <= budget
    )
    found = search(model, budget, compiler)
    assert found.best.compiled_bytes <= budget
    assert len(compiler.calls) == len(found.tried) <= 5
    assert len(set(compiler.calls)) == len(compiler.calls), "a plan compiled twice"
    assert found.lower_bound <= found.best.proposal.cost
    assert found.best.proposal.cost <= best_possible + 2  # rungs, of 50


@pytest.mark.parametrize("bias", [{}, {"offset": 60}, {"scale": 1.3}], ids=str)
def test_a_larger_budget_never_costs_more(bias):
    model = Ladder()
    costs = []
    for budget in range(600, 1900, 20):
        found = search(model, budget, Compiler(model, **bias))
        costs.append(found.best.proposal.cost)
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1] == 0


def test_an_exact_model_takes_one_compile():
    model = Ladder()
    compiler = Compiler(model)
    found = search(model, FIXED + 510, compiler)
    assert compiler.calls == ["26xfull"]
    assert found.best.predicted_bytes == found.best.compiled_bytes == FIXED + 510


def test_stops_when_nothing_is_left_to_gain():
    model = Ladder()
    compiler = Compiler(model)
    found = search(model, 10**6, compiler)
    assert compiler.calls == ["51xfull"]
    assert found.best.proposal.cost == 0


def test_a_fitting_proposal_that_leaves_much_is_improved():
    """The compiler needs half of what the model says: a larger rung is tried."""
    model = Ladder()
    compiler = Compiler(model, scale=0.5)
    found = search(model, FIXED + 300, compiler)
    assert compiler.calls[0] == "15xfull"
    assert found.best.proposal.layer_plan == "30xfull"
    assert found.best.compiled_bytes == FIXED + 295


def test_of_what_fits_the_cheapest_is_the_answer_not_the_last():
    """The second compile is one that fits, too, and is no better."""
    model = Ladder(rungs=3)
    compiler = Compiler(model, special={"3xfull": 900, "2xfull": 700, "1xfull": 600})
    found = search(model, 800, compiler)
    assert found.best.proposal.layer_plan == "2xfull"


def test_where_the_model_is_far_off_other_shapes_are_tried():
    """The model's plans need three times as much; one of another shape fits."""
    other = Proposal("other", 400, 30.0, flops=0)
    model = Ladder(small=(other,))
    compiler = Compiler(model, offset=700, special={"other": 880})
    found = search(model, 900, compiler)
    assert found.best.proposal == other
    assert len(compiler.calls) <= 5


def test_a_cheaper_shape_is_preferred_to_a_full_budget():
    """A small plan uses all of the budget; another is cheaper and fits."""
    costly, cheap = Proposal("costly", 5, 60.0, 0), Proposal("cheap", 9, 55.0, 0)
    model = Ladder(small=(costly, cheap))
    compiler = Compiler(model, offset=700, special={"costly": 899, "cheap": 850})
    assert search(model, 900, compiler).best.proposal == cheap


def test_infeasible_says_what_the_least_needs():
    model = Ladder()
    compiler = Compiler(model, offset=2000)
    with pytest.raises(Infeasible) as error:
        search(model, 1024, compiler)
    message = str(error.value)
    assert "no plan fits 1.00 KiB per device: the least needs 2.45 KiB" in message
    assert "400 B arguments" in message and "1xfull" in message
    assert "\n" not in message
    assert compiler.calls[0] != "1xfull" and "1xfull" in compiler.calls
    assert len(compiler.calls) <= 5


def test_static_state_above_the_budget_is_said_before_any_compile():
    model = Ladder()
    compiler = Compiler(model)
    with pytest.raises(Infeasible, match="399 B .* 400 B .weights 300 B, batch 100 B"):
        search(model, 399, compiler)
    assert compiler.calls == []
    check_static(STATIC, 400)


def test_few_compiles_end_with_a_small_plan():
    model = Ladder()
    compiler = Compiler(model, offset=100)
    found = search(model, 800, compiler, max_compiles=2)
    assert compiler.calls == ["15xfull", "1xfull"]
    assert found.best.proposal.layer_plan == "1xfull"
    one = Compiler(model, offset=100)
    assert search(model, 800, one, max_compiles=1).best.proposal.layer_plan == "1xfull"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"error": "RESOURCE_EXHAUSTED"}, "51xfull does not compile: RESOURCE_EXHAUST"),
        ({"device_total_bytes": None}, "does not tell the memory"),
    ],
)
def test_what_does_not_compile_is_an_error(row, message):
    with pytest.raises(PlanError, match=message):
        search(Ladder(), 10**6, lambda text: row)


def test_progress_names_every_candidate():
    told = []
    model = Ladder()
    search(model, FIXED + 510, Compiler(model), progress=told.append)
    assert told == ["solving", "compiling candidate 1: 26xfull"]


class TwoShapes(Ladder):
    """Beside the ladder, groups: costlier, of 4 to 400 bytes."""

    shapes = 2

    def __init__(self):
        super().__init__()
        self.rungs = self.rungs[20:]  # 410 bytes or more
        self.groups = [
            Proposal(f"{i + 2}x2xfull", 4 * i, float(200 - i), flops=i, shape=1)
            for i in range(1, 101)
        ]

    def propose(self, allowance, shape=0):
        if shape == 0:
            return super().propose(allowance)
        fits = [one for one in self.groups if one.memory <= allowance]
        if not fits:
            raise Infeasible("no groups fit")
        return min(fits, key=lambda one: one.cost)

    def smallest(self, shape=0):
        return self.groups[:1] if shape else self.rungs[:1]

    def find(self, text):
        every = (*self.rungs, *self.groups)
        return next(one for one in every if one.layer_plan == text)


def test_the_least_of_a_cheaper_shape_is_tried_where_the_model_may_be_off():
    """The model is 80 over, as the first compile shows; without that it says groups."""
    model = TwoShapes()
    compiler = Compiler(model, offset=-80)
    found = search(model, FIXED + 345, compiler)
    assert compiler.calls == ["21xfull"]
    assert found.best.compiled_bytes == FIXED + 330


def test_a_shape_far_over_the_budget_is_not_compiled():
    model = TwoShapes()
    compiler = Compiler(model)
    found = search(model, FIXED + 200, compiler)
    assert compiler.calls == ["52x2xfull"]
    assert found.best.compiled_bytes == FIXED + 200


def test_what_is_learned_of_one_shape_does_not_count_for_one_that_has_its_own():
    """Layers by themselves need 100 more than the model says, groups do not."""
    model = TwoShapes()
    offset = {one.layer_plan: FIXED + one.memory + 100 for one in model.rungs}
    compiler = Compiler(model, special=offset)
    found = search(model, FIXED + 396, compiler)
    assert compiler.calls[0] == "21xfull"  # 410, and 510 compiled
    assert found.best.proposal.shape == 1
    assert found.best.compiled_bytes == FIXED + 396  # by what groups told, not layers
    assert len(compiler.calls) == 3


def test_one_more_compile_where_it_saves_half_of_what_is_left():
    """Of the two cheapest rungs the first fits with a byte to spare, by the compiler
    the last one, too."""
    model = Ladder()
    compiler = Compiler(model, special={"50xfull": 1480, "51xfull": 1499})
    found = search(model, 1500, compiler)
    assert compiler.calls == ["50xfull", "51xfull"]
    assert found.best.proposal.cost == 0
