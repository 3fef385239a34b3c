"""The picture of a plan: whose rates its seconds are of, and nothing covered."""

from types import SimpleNamespace

import pytest

from jaxckpt.training import plan_table

MIB = 2**20


def planned(rates):
    """What `draw_frontier` reads of a planned run: two choices, one compiled plan."""
    points = [SimpleNamespace(memory=m * MIB, cost=c) for m, c in ((8, 0.004), (20, 0))]
    best = SimpleNamespace(compiled_bytes=14 * MIB, proposal=points[0])
    stack = SimpleNamespace(choices=points, uniform=lambda point: point)
    return SimpleNamespace(
        plan=SimpleNamespace(model="tiny", target="cpu", budget_bytes=15 * MIB),
        problem=SimpleNamespace(stack=stack, rates=rates),
        found=SimpleNamespace(best=best, tried=[best]),
        rows=[],
    )


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr(plan_table, "save", lambda figure, path: figures.append(figure))
    return figures


@pytest.mark.parametrize(
    ("rates", "said"),
    [("a CPU", "(estimated at a CPU's rates)"), ("", "(estimated)")],
)
def test_seconds_say_whose_rates_they_are_of(drawn, rates, said):
    plan_table.draw_frontier(planned(rates), "x.png")
    assert drawn[0].axes[0].get_ylabel().endswith(f"ms per step\n{said}")


def test_the_key_covers_no_line(drawn):
    plan_table.draw_frontier(planned(""), "x.png")
    (figure,) = drawn
    (axes,) = figure.axes
    assert axes.get_legend() is None
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[-1] == "budget 15.00 MiB"
    assert list(axes.get_lines()[-1].get_xdata()) == [15, 15]
    assert list(axes.get_lines()[0].get_xdata()) == [14, 26]  # moved to what compiled
