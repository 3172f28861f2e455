from bayplan.data.record import PlanPoint
from bayplan.planning.memory.records import without_beaten


def point(peak_bytes, time_ratio, *, name="auto", is_chosen=False):
    return PlanPoint(name=name, peak_bytes=peak_bytes, time_ratio=time_ratio, is_chosen=is_chosen)


def test_more_memory_is_never_shown_slower():
    # The chosen plan was below its neighbours of a curve that was searched for more quickly.
    chosen = point(30, 1.09, is_chosen=True)
    kept = [point(20, 1.2), chosen, point(40, 1.03), point(32, 1.17, name="checkpoint-speed")]
    beaten = [point(32, 1.12), point(37, 1.10)]
    assert [*without_beaten([*kept[:2], *beaten, *kept[2:]])] == kept
    assert [*without_beaten([chosen, point(29, 1.0)])] == [chosen, point(29, 1.0)]
