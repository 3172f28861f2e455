"""Prints the table of docs/tuning.md: the tuner on many simulated links.

python tests/running/tuning/sweep.py          # 300 links at each noise, some minutes
"""

import statistics
import sys

from simulated import Machine, drive, random_world  # pyrefly: ignore[missing-import] - beside it

from bayplan.running.tuning.tuner import Tuner

SEEDS = range(3000, 3300)  # on which no constant of the tuner was chosen


def main(error: float) -> None:
    print("| scatter of steps | steps, median and most | slower than the best of all, ... |")
    for noise in (0.01, 0.03, 0.05, 0.2):
        steps, excesses = [], []
        for seed in SEEDS:
            world = random_world(seed, error=error)
            machine = Machine(world.truth, noise, seed)
            tuner = Tuner(world.candidates, world.predicted.step_seconds)
            drive(tuner, machine)
            steps.append(machine.num_steps)
            excesses.append(world.excess(tuner.best))
        print(
            f"| {noise:.0%} | {statistics.median(steps):.0f}, {max(steps)}"
            f" | {statistics.median(excesses):.1%}, {max(excesses):.1%}"
            f" ({sum(one > 0.05 for one in excesses)} of {len(SEEDS)} above 5 %) |"
        )
    print(tuner.verdict)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.2)
