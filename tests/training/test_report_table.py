"""The picture of a report: memory from left to right, as in all pictures."""

from jaxckpt.training import report_table

MIB = 2**20


def test_memory_is_across_and_recomputation_up(monkeypatch):
    figures = []
    monkeypatch.setattr(report_table, "save", lambda figure, _: figures.append(figure))
    rows = [
        {
            "policy": policy,
            "device_total_bytes": mebibytes * MIB,
            "recompute_fraction": again,
            "fits": mebibytes < 64,
        }
        for policy, mebibytes, again in (("none", 96, 0), ("full", 32, 0.25))
    ]
    rows.append({"policy": "sqrt", "error": "does not compile"})
    report = {
        "model": "tiny", "target": "cpu", "device": "a device", "rows": rows,
        "memory_limit": 64 * MIB,
    }  # fmt: skip
    report_table.draw_frontier(report, "x.png")
    (axes,) = figures[0].axes
    none, full, limit = axes.get_lines()
    assert [*none.get_xydata()[0], none.get_marker()] == [96, 0, "X"]
    assert [*full.get_xydata()[0], full.get_marker()] == [32, 25, "o"]
    assert list(limit.get_xdata()) == [64, 64]
    assert "MiB" in axes.get_xlabel() and "recomputed" in axes.get_ylabel()
