"""What people read of why a plan is as it is."""

from bayplan.data.judgement import (
    Alternative,
    Binding,
    Gain,
    Judgement,
    MemoryNeed,
    StageJudgement,
    Why,
)
from bayplan.reporting.clusters import why_text

MEMORY = MemoryNeed(
    weight_bytes=2**20,
    version_bytes=0,
    gradient_bytes=2**20,
    state_bytes=2**21,
    activation_bytes=2**22,
    transfer_bytes=0,
    bucket_bytes=0,
    allocated_bytes=2**23 + 2**20,
    context_bytes=2**20,
    device_bytes=2**30,
)


def stage(at: int, *, is_recomputed: bool = False) -> StageJudgement:
    return StageJudgement(
        first=2 * at,
        last=2 * at + 1,
        devices=(at,),
        busy=(0.5,),
        compute_seconds=0.01,
        transfer_seconds=0.002,
        sum_seconds=0.0,
        receive_wait_seconds=0.0,
        sum_wait_seconds=0.0,
        in_flight=1,
        is_recomputed=is_recomputed,
        memory=MEMORY,
    )


def why(num_stages: int, **more) -> Why:
    judgement = Judgement(
        seconds=0.02,
        low_seconds=0.018,
        high_seconds=0.022,
        num_samples=64,
        stages=tuple(stage(at, is_recomputed=at == 0) for at in range(num_stages)),
        binding=Binding.COMPUTE,
        binding_stage=0,
        bubble=0.5,
        num_simulated=num_stages,
    )
    given = {
        "name": "plan",
        "shape": "1:1",
        "num_micro_batches": 4,
        "schedule": "1f1b",
        "staleness": 0,
        "judgement": judgement,
        "binding": "stage 0",
        **more,
    }
    return Why(**given)


def test_a_plan_with_all_its_parts(snapshot):
    text = why_text(
        why(
            2,
            staleness=1,
            findings=("half of it is idle",),
            data_parallel_seconds=0.03,
            gains=(
                Gain(name="removed sums", seconds=0.012, note="none is left"),
                Gain(name="pipelining", seconds=-0.002),
            ),
            alternatives=(
                Alternative(
                    name="1 stage", shape="2", seconds=0.021, reason="+5.0%: sums", is_tie=True
                ),
                Alternative(
                    name="pure data parallel", shape="2", seconds=None, reason="does not fit"
                ),
            ),
        )
    )
    assert text == snapshot


def test_of_many_stages_the_ends_are_shown():
    lines = why_text(why(40)).splitlines()
    assert sum(line.split()[:1] == ["..."] for line in lines) == 1
    assert len(lines) < 25


def test_data_parallel_itself_has_no_difference():
    text = why_text(why(1, data_parallel_seconds=0.02, gains=(Gain(name="x", seconds=0.0),)))
    assert "pure data parallel takes as long: 20.0 ms" in text
