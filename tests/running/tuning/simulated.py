"""Simulated links: buckets that queue for a wire while backward goes on, timed with noise.

A message takes a latency and a time for its bytes, one after the other, each from when its last
gradient is made; a step ends when backward and the last message have. What is predicted has its own
latencies and bandwidths, so predictions are wrong in the way in which real ones are: all of an
algorithm, and small messages otherwise than large ones.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bayplan.data.exchange import Algorithm, ExchangeSettings
from bayplan.running.tuning.tuner import Tuner

MIB = 1 << 20
NAMES = (Algorithm.RING, Algorithm.REDUCE_SCATTER, Algorithm.HIERARCHICAL)
THRESHOLDS = tuple(MIB * size // 4 for size in (0, 1, 2, 4, 8, 16, 32, 64, 128, 256))


def resnet_like() -> tuple[int, ...]:
    """161 gradients of 25 MB, in the order of backward: large ones first."""
    return tuple(
        int(4 * MIB * math.exp(-index / 10)) + 2000 * (161 - index) for index in range(40)
    ) + tuple(3000 + 40 * (index % 50) ** 2 for index in range(121))


def vgg_like() -> tuple[int, ...]:
    """Few gradients of 69 MB, of which one has 51."""
    return (MIB // 2, 8 * MIB, 51 * MIB, *(int(2 * MIB * 0.7**index) + 256 for index in range(29)))


@dataclass(frozen=True)
class Link:
    """What a step takes.

    Attributes:
        costs: by algorithm, seconds of a message and bytes per second.
        rest_seconds: forward and update.
    """

    costs: dict[Algorithm, tuple[float, float]]
    gradients: tuple[int, ...] = field(default_factory=resnet_like)
    backward_seconds: float = 0.1
    rest_seconds: float = 0.05

    def step_seconds(self, setting: ExchangeSettings) -> float:
        cycle, end, each = setting.cycle_time_ms / 1e3, 0.0, self.backward_seconds
        for size_bytes, made in self._buckets(setting.fusion_threshold_bytes):
            ready = made * each
            if cycle:
                ready = math.ceil(ready / cycle) * cycle
            end = max(end, ready) + self._message_seconds(setting.algorithm, size_bytes)
        return self.rest_seconds + max(end, each)

    def slower(self, factor: float) -> "Link":
        """The same with a thinner wire."""
        costs = {name: (alpha, beta / factor) for name, (alpha, beta) in self.costs.items()}
        return replace(self, costs=costs)

    def _message_seconds(self, algorithm: Algorithm, size_bytes: int) -> float:
        chosen = self.costs if algorithm is Algorithm.AUTO else {algorithm: self.costs[algorithm]}
        return min(alpha + size_bytes / beta for alpha, beta in chosen.values())

    def _buckets(self, threshold_bytes: int | None) -> list[tuple[int, float]]:
        """Bytes of each, and the share of backward after which it is full."""
        most = 2 * MIB if threshold_bytes is None else threshold_bytes
        total, count = sum(self.gradients), len(self.gradients)
        buckets: list[tuple[int, float]] = []
        filled = done = 0
        for index, size_bytes in enumerate(self.gradients):
            if filled and filled + size_bytes > most:
                buckets.append((filled, (done / total + index / count) / 2))
                filled = 0
            filled += size_bytes
            done += size_bytes
        return [*buckets, (filled, 1.0)]


@dataclass
class Machine:
    """Runs steps and times them: scatter, now and then a step that takes much longer, drift."""

    link: Link
    noise: float
    seed: int = 0
    outliers: float = 0.03
    drift: float = 0.0  # per step, of its time
    num_steps: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def run(self, setting: ExchangeSettings, num_steps: int) -> list[float]:
        return [self._step(setting) for _ in range(num_steps)]

    def _step(self, setting: ExchangeSettings) -> float:
        self.num_steps += 1
        seconds = self.link.step_seconds(setting) * (1 + self.drift) ** self.num_steps
        seconds *= math.exp(self._random.gauss(0.0, self.noise))
        if self._random.random() < self.outliers:
            seconds *= 1 + 5 * self._random.random()
        return seconds


@dataclass(frozen=True)
class World:
    """A true link, what is predicted of it, and settings to choose from."""

    truth: Link
    predicted: Link
    candidates: tuple[ExchangeSettings, ...]

    def best_seconds(self, link: Link | None = None) -> float:
        """That of an exhaustive sweep without noise."""
        return min(map((link or self.truth).step_seconds, self.candidates))

    def excess(self, setting: ExchangeSettings, link: Link | None = None) -> float:
        """How much slower a setting is than the best."""
        return (link or self.truth).step_seconds(setting) / self.best_seconds(link) - 1


def drive(tuner: Tuner, machine: Machine, *, most_steps: int = 10_000) -> None:
    """Run steps until the tuner has ended."""
    begun = machine.num_steps
    while not tuner.is_finished:
        trial = tuner.ask()
        tuner.tell(machine.run(trial.setting, trial.num_steps))
        assert machine.num_steps - begun <= most_steps


def random_world(seed: int, *, error: float = 0.3) -> World:
    """A link of any kind, predicted with errors of its latencies and bandwidths."""
    dice = random.Random(seed)
    truth = {name: (10 ** dice.uniform(-4, -2.3), 10 ** dice.uniform(7.9, 9.2)) for name in NAMES}
    predicted = {
        name: (alpha * math.exp(dice.gauss(0, error)), beta * math.exp(dice.gauss(0, error)))
        for name, (alpha, beta) in truth.items()
    }
    gradients = dice.choice([resnet_like, vgg_like])()
    backward = dice.choice([0.0, 0.05, 0.1, 0.2])
    link = Link(truth, gradients, backward)
    return World(link, replace(link, costs=predicted), all_settings())


def all_settings(
    thresholds: Sequence[int] = THRESHOLDS, names: Sequence[Algorithm] = NAMES
) -> tuple[ExchangeSettings, ...]:
    """Every algorithm with every threshold, and with the planned buckets."""
    return tuple(
        ExchangeSettings(fusion_threshold_bytes=threshold, algorithm=name)
        for name in names
        for threshold in (None, *thresholds)
    )
