"""Cases for real ranks: planned here, run by as few starts of processes as can be."""

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bayplan.data import files
from bayplan.data.placement import Placement
from bayplan.data.plan import RankPlan
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy, place
from bayplan.preparing.stages import PreparedStages
from bayplan.running.ranks.launching import launch
from bayplan.step import TrainingStep

collect_ignore = ["mistakes.py"]  # a script that imports its neighbour, as scripts can
SCRIPT = Path(__file__).parent / "training.py"
TIMEOUT_SECONDS = 250.0


def load_script() -> Any:
    """The script as a module; torch looks it up by name when it traces a model of it."""
    name = "bayplan_tests_training"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPT)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


@dataclass(frozen=True)
class Case:
    """One training: a name, and what `RankPlanOptions` are told."""

    name: str
    placement: str
    model: str = "plain"
    batch: int = 8
    wishes: dict[str, Any] = field(default_factory=dict)
    swap: str | None = None
    edit: Callable[[RankPlan, TrainingStep], RankPlan] = lambda plan, step: plan
    dtype: str = "float64"
    steps: int = 4
    limit_share: float | None = None  # of the largest peak of a rank that keeps everything

    def plan(self) -> RankPlan:
        step = load_script().build(self.model, self.batch, self.dtype)
        wishes = RankPlanOptions(
            placement=Placement.parse(self.placement),
            time_limit_seconds=1.0,
            **{"shares_by": SharesBy.OPS, **self.wishes},
        )
        prepared = PreparedStages(step=step)
        if self.limit_share is None:
            return self.edit(place(prepared, wishes), step)
        # With a limit that is never met, scratch memory of kernels is in the prediction.
        plain = place(prepared, replace(wishes, limit_bytes=1 << 40))
        limit_bytes = int(self.limit_share * max(plain.predicted_peak_bytes))
        return self.edit(place(prepared, replace(wishes, limit_bytes=limit_bytes)), step)

    def told(self, plan: str) -> dict[str, Any]:
        """What the script is told, with the file of its plan."""
        names = ("name", "model", "batch", "dtype", "steps", "swap")
        return {"plan": plan, **{name: getattr(self, name) for name in names}}


@dataclass
class Ranks:
    """Runs cases, and keeps what was shown."""

    folder: Path
    lines: list[str] = field(default_factory=list)

    def write(self, case: Case, *, name: str = "") -> str:
        """Plan a case; returns the file's name."""
        path = self.folder / f"{name or case.name}.plan.json"
        files.write(path, case.plan())
        return path.name

    def run(self, cases: Sequence[dict[str, Any]], *, num_ranks: int) -> int:
        (self.folder / "cases.json").write_text(json.dumps(cases))
        return launch(
            [str(SCRIPT), str(self.folder)],
            num_ranks=num_ranks,
            log_folder=self.folder / "logs",
            timeout_seconds=TIMEOUT_SECONDS,
            on_line=self.lines.append,
        )

    def plan_all(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Returns what the script is to be told."""
        given = [case.told(self.write(case)) for case in cases]
        torch.compiler.reset()
        return given

    def run_all(self, cases: Sequence[Case], *, num_ranks: int) -> None:
        code = self.run(self.plan_all(cases), num_ranks=num_ranks)
        assert code == 0, "\n".join(self.lines)

    def results(self, case: Case, *, num_ranks: int) -> list[dict[str, Any]]:
        return [
            json.loads((self.folder / f"{case.name}.{rank}.json").read_text())
            for rank in range(num_ranks)
        ]


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    return Case


@pytest.fixture(scope="session")
def training() -> Any:
    """The script that ranks run, for a training in this process."""
    return load_script()


@pytest.fixture(scope="module")
def selected_names(request: pytest.FixtureRequest) -> set[str]:
    """The cases that this run's tests of the file ask for by `name`; only these are trained."""
    return {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and "name" in item.fixturenames
    }


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Ranks]:
    return lambda: Ranks(tmp_path_factory.mktemp("ranks"))
