"""Draw docs/memory.svg: memory over one step of ResNet-50, plain and planned (simulated).

Both curves are replays on a catalogue device, so nothing is trained and any machine draws the same.
"""

import sys
from itertools import accumulate
from pathlib import Path

from bayplan.api import planner_of
from bayplan.costing.catalogue import load_device
from bayplan.costing.roofline import derive_profile
from bayplan.data.live_memory import replay_memory
from bayplan.data.units import Limit
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import arrangement_of

WIDTH, HEIGHT, LEFT, TOP = 800, 300, 60, 20


def main() -> None:
    kind = load_device("titan-v")
    planner = planner_of("resnet50", 64, optimizer="sgd", device=kind)
    step = planner.step
    limit = Limit.parse("50%")
    plain = replay_memory(step.graph, [0] * len(step.graph.nodes)).total_bytes
    plain_ends = list(accumulate(derive_profile(step.graph, kind).seconds))
    order = planner.order(limit)
    steps = arrangement_of(order).apply(step.traced.with_packs(order.packs).program).program
    planned = replay_schedule(steps, plain_schedule(steps)).total_bytes
    planned_ends = list(accumulate(op.seconds for op in steps.ops))
    limit_bytes = limit.of(step.plain_peak_bytes)
    ends = max(plain_ends[-1], planned_ends[-1])

    def path(ends_of_steps: list[float], totals: tuple[int, ...]) -> str:
        corners = []
        for end, total in zip([0.0, *ends_of_steps], [totals[0], *totals], strict=True):
            x = LEFT + (WIDTH - LEFT - 20) * end / ends
            corners.append(f"{x:.1f},{y_of(total):.1f}")
        return " ".join(corners)

    def y_of(total_bytes: int) -> float:
        return TOP + (HEIGHT - TOP - 40) * (1 - total_bytes / max(plain))

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<polyline fill="none" stroke="#999" points="{path(plain_ends, plain)}"/>',
        f'<polyline fill="none" stroke="#06c" points="{path(planned_ends, planned)}"/>',
        f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y_of(limit_bytes):.1f}"'
        f' y2="{y_of(limit_bytes):.1f}" stroke="#c00" stroke-dasharray="6 4"/>',
        f'<text x="{LEFT}" y="{y_of(limit_bytes) - 6:.1f}" fill="#c00">limit'
        f" {limit_bytes / 2**30:.1f} GiB</text>",
        f'<text x="{LEFT}" y="{TOP}" fill="#666">plain: peak {max(plain) / 2**30:.1f} GiB</text>',
        f'<text x="{LEFT + 180}" y="{TOP}" fill="#06c">planned: peak'
        f" {max(planned) / 2**30:.1f} GiB, {order.time_ratio:.2f} x the time</text>",
        f'<text x="{LEFT}" y="{HEIGHT - 10}" fill="#666">one training step of ResNet-50, batch 64,'
        " on a TITAN V (simulated): live memory over time</text>",
        "</svg>",
    ]
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/memory.svg")
    target.write_text("\n".join(lines) + "\n")
    print(f"{target}: plain {max(plain)}, planned {max(planned)}, ratio {order.time_ratio:.3f}")


if __name__ == "__main__":
    main()
