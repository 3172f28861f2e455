"""Loaders at work: samples made ready ahead of the forwards that take them."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from bayplan.data.actions import Action, ActionKind
from bayplan.planning.pipelines.sharing import SharedResources
from bayplan.planning.pipelines.step_costs import Loading

__all__ = ["Loaders"]

_Samples = tuple[int, Action, int]  # of a rank's forward, of a batch


@dataclass
class Loaders:
    """All loaders of a step that is done some times.

    Attributes:
        loading: what samples take.
        actions: by rank.
        num_batches: that are loaded.
        clock: whose time passes.
        ready: hears of samples that are there.
    """

    loading: Loading
    actions: Sequence[Sequence[Action]]
    num_batches: int
    clock: SharedResources
    ready: Callable[[_Samples], None]
    _wanted: dict[Hashable, list[tuple[int, Action]]] = field(default_factory=dict)
    _num_left: dict[tuple[Hashable, int], int] = field(default_factory=dict)
    _loaded: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    _is_idle: set[Hashable] = field(default_factory=set)

    def __post_init__(self) -> None:
        for rank, own in enumerate(self.actions):
            for action in own:
                if action.kind is ActionKind.FORWARD and self.needs(rank, action):
                    self._wanted.setdefault(self.loading.loader(rank), []).append((rank, action))
        for loader, wanted in self._wanted.items():
            wanted.sort(key=lambda one: (one[1].index, one[0]))
            for batch in range(self.num_batches):
                self._num_left[loader, batch] = len(wanted)

    def needs(self, rank: int, action: Action) -> bool:
        """Whether a forward takes samples."""
        return self.loading.seconds(rank, action) > 0

    def start(self) -> None:
        """Let all begin with the first batch."""
        for loader in self._wanted:
            self._load(loader)

    def take(self, rank: int, batch: int) -> None:
        """A forward took its samples, so there is room for others."""
        loader = self.loading.loader(rank)
        self._num_left[loader, batch] -= 1
        if not self._num_left[loader, batch] and loader in self._is_idle:
            self._is_idle.discard(loader)
            self._load(loader)

    def _load(self, loader: Hashable) -> None:
        """Begin with the next samples, if there is room for them."""
        wanted = self._wanted[loader]
        batch, at = divmod(self._loaded[loader], len(wanted))
        if batch == self.num_batches:
            return
        if self._num_left.get((loader, batch - self.loading.num_ahead), 0):
            self._is_idle.add(loader)
            return
        rank, action = wanted[at]

        def done() -> None:
            self._loaded[loader] += 1
            self._load(loader)
            self.ready((rank, action, batch))

        self.clock.begin(self.loading.seconds(rank, action), then=done)
