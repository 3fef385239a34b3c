"""Pictures: what is drawn is what was given, and not only colors tell it apart."""

import matplotlib
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from jaxckpt import pictures
from jaxckpt.compiler.timeline import KINDS, Timeline

MIB = 2**20
LINE = Timeline(
    (0, 1, 2, 3),
    ("forward", "recompute", "backward", "other"),
    {
        "arguments": (4 * MIB,) * 4,
        "forward": (8 * MIB, 8 * MIB, 2 * MIB, 0),
        "recompute": (0, 3 * MIB, 3 * MIB, 0),
        "backward": (0, 0, 12 * MIB, MIB),
        "other": (0, 0, 0, MIB),
    },
)
PEAK = [
    {"bytes": (9 - number) * MIB, "what": what, "phase": "forward", "source": ""}
    for number, what in enumerate(["mlpwi_0/dot_general", "a_name_of_more_than" * 3])
]


def row(policy="save:context", **fields):
    saved = [
        {"name": "context", "location": "device", "bytes_per_layer": MIB, "layers": 4},
        {"name": "mlpwi_0", "location": "host", "bytes_per_layer": MIB, "layers": 2},
    ]
    return {
        "policy": policy,
        "applied": f"4x{policy}",
        "timeline": LINE.as_dict(),
        "peak": PEAK,
        "saved": saved,
        "argument_bytes": 4 * MIB,
        "temp_bytes": 18 * MIB,
        "device_total_bytes": 22 * MIB,
        "activation_saving": 0.5,
        "recompute_fraction": 0.1,
        **fields,
    }


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were written."""
    figures = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures.append(figure))
    return figures


def texts(figure: Figure) -> str:
    found = figure.findobj(matplotlib.text.Text)
    return "\n".join(text.get_text() for text in found)


def test_a_timeline_says_what_it_is(drawn, tmp_path):
    rows = [row(), row("none", device_total_bytes=1000 * MIB)]
    pictures.draw_timelines(rows, tmp_path / "x.png", title="tiny on cpu")
    said = texts(drawn[0])
    for part in (
        "tiny on cpu", "as compiled", "one device", "MiB, per device", "save:context",
        "none", "peak 21.00 MiB", "9.00 MiB  mlpwi_0/dot_general", "4.00 MiB  all oth",
        "22.00 MiB  XLA allocates", "1000.00 MiB", "recomputed", "scheduled order",
    ):  # fmt: skip
        assert part in said, part


def test_areas_are_stacked_to_the_total(drawn, tmp_path):
    pictures.draw_timelines([row()], tmp_path / "x.png", title="")
    axes = drawn[0].axes[0]
    heights = [area.get_paths()[0].vertices[:, 1].max() for area in axes.collections]
    assert heights == [4, 12, 15, 21, 21]  # arguments, forward, recompute, ... , MiB


def test_kept_values_are_stacked_by_name(drawn, tmp_path):
    bars = {"save:context": row()["saved"], "none": row()["saved"][:1]}
    pictures.draw_kept(bars, tmp_path / "x.png", title="tiny on cpu")
    (axes,) = drawn[0].axes
    widths = {
        part.get_label(): [patch.get_width() for patch in part]
        for part in axes.containers
    }
    assert widths == {"context": [4, 4], "mlpwi_0 (host)": [2, 0]}
    assert "6.00 MiB" in texts(drawn[0]) and "counted" in texts(drawn[0])


def test_more_names_than_fit_are_summed(drawn, tmp_path):
    many = [
        {"name": f"v{n}", "location": "device", "bytes_per_layer": MIB, "layers": n}
        for n in range(1, 16)
    ]
    pictures.draw_kept({"none": many}, tmp_path / "x.png", title="")
    bars = {
        part.get_label(): part[0].get_width() for part in drawn[0].axes[0].containers
    }
    assert bars["4 others, smaller"] == 1 + 2 + 3 + 4 and "v5" in bars
    assert sum(bars.values()) == sum(range(1, 16))


def test_a_receipt_shows_both_steps(drawn, tmp_path):
    receipt = {
        "requested": "save:context",
        "applied": "4xsave:context",
        "step": row(),
        "without_remat": row("none", device_total_bytes=None),
    }
    pictures.draw_receipt(receipt, tmp_path / "x.png")
    said = texts(drawn[0])
    for part in (
        "4xsave:context",
        "saves 50.0%",
        "costs 10.0%",
        "without remat",
        "22.",
    ):
        assert part in said, part


def test_the_file_is_a_picture(tmp_path):
    pictures.draw_timelines([row()], tmp_path / "x.png", title="")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_kinds_differ_in_gray_or_in_hatch():
    """Red, green and blue as an eye without color sees them."""

    def gray(color):
        weights = zip((0.299, 0.587, 0.114), to_rgb(color), strict=True)
        return sum(a * b for a, b in weights)

    styles = [pictures._KIND_STYLE[kind] for kind in KINDS]
    for number, (color, hatch) in enumerate(styles):
        for other, other_hatch in styles[:number]:
            assert hatch != other_hatch or abs(gray(color) - gray(other)) > 0.15
