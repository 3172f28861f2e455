"""Every row of reports 000 to 002 that names a memory, and the run that it was measured with.

Eight TITAN V of 12066 MiB, driver 440.64, in 2020; OneFlow's staged pipeline with stale weights and
its data parallel, PipeDream and its data parallel. Memory is what nvidia-smi shows for each
process, which holds the context of CUDA and whatever the allocator keeps. Rows that differ in the
source of the images alone share a run here: ours come from memory.
"""

from dataclasses import dataclass

__all__ = ["RUNS", "Reported", "Run"]

_SEVEN_TO_ONE = "0:0-6.0:7"
_TWO_NODES = "0:0-7,1:0-7.0:0-7,1:0-7"


@dataclass(frozen=True, kw_only=True)
class Reported:
    """One row of a report.

    Attributes:
        line: of the report's table.
        memory_mib: by device; of two nodes, the first one's.
        utilisation: percent by device, where the report shows it.
        epoch_seconds: the last one given; None where the report leaves it blank.
    """

    report: str
    line: int
    data: str
    memory_mib: tuple[int, ...]
    epoch_seconds: float | None
    images_per_second: float | None
    utilisation: tuple[int, ...] = ()
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one or more rows of reports were measured with.

    Attributes:
        model: here; the name of the full model has a dash where this one has an underscore.
        batch: of all devices together.
        placement: empty for data parallel.
        local: instead of the placement, where that has more ranks than are started here.
        is_round_robin: each replica takes a whole micro-batch in turn, as in PipeDream.
    """

    name: str
    model: str
    batch: int
    placement: str = ""
    local: str = ""
    shares: tuple[int, ...] = ()
    cut_at: str = ""
    is_round_robin: bool = False
    has_static_order: bool = True
    reported: tuple[Reported, ...] = ()

    @property
    def is_pipeline(self) -> bool:
        """Whether it has more than one stage."""
        return "." in self.placement


def _even(mib: int, *, first: int | None = None, number: int = 8) -> tuple[int, ...]:
    return (mib if first is None else first, *[mib] * (number - 1))


_ALEXNET_15 = (
    Reported(
        report="000",
        line=4,
        data="synthetic",
        memory_mib=(4817, 4817, 4817, 4817, 4817, 4817, 4793, 721),
        epoch_seconds=66.07,
        images_per_second=19406.3,
        utilisation=(97, 99, 99, 97, 98, 99, 99, 0),
    ),
)
_ALEXNET_3 = (
    Reported(
        report="001",
        line=166,
        data="synthetic",
        memory_mib=(4621, 4953, 4953, 4953, 4953, 4953, 4929, 969),
        epoch_seconds=85.51,
        images_per_second=14994.5,
        utilisation=(86, 88, 88, 87, 88, 89, 76, 9),
    ),
    Reported(
        report="002",
        line=37,
        data="synthetic",
        memory_mib=(4621, 4953, 4953, 4953, 4953, 4953, 4929, 969),
        epoch_seconds=85.22,
        images_per_second=15045.5,
        utilisation=(83, 88, 82, 80, 89, 87, 90, 9),
    ),
    Reported(
        report="002",
        line=40,
        data="real",
        memory_mib=(6065, 6397, 6397, 6397, 6397, 6397, 6373, 1003),
        epoch_seconds=105.36,
        images_per_second=12169.5,
        utilisation=(72, 76, 71, 75, 74, 70, 72, 10),
    ),
)
_VGG_11 = (
    Reported(
        report="001",
        line=165,
        data="real",
        memory_mib=(9229, 9335, 9335, 9335, 9335, 9335, 9311, 4499),
        epoch_seconds=1351.686,
        images_per_second=947.9,
        utilisation=(76, 48, 89, 51, 89, 47, 46, 13),
    ),
    Reported(
        report="002",
        line=34,
        data="real",
        memory_mib=(9089, 9195, 9195, 9195, 9195, 9195, 9171, 4499),
        epoch_seconds=1344.0,
        images_per_second=953.3,
        utilisation=(50, 72, 46, 81, 44, 61, 54, 29),
    ),
    Reported(
        report="002",
        line=35,
        data="synthetic",
        memory_mib=(7779, 7885, 7885, 7885, 7885, 7885, 7861, 4839),
        epoch_seconds=1263.28,
        images_per_second=1014.2,
        utilisation=(63, 65, 60, 90, 58, 65, 63, 33),
        note="the table has 4499 MiB for device 7, nvidia-smi 4839",
    ),
)


def _resnet(
    report: str, line: int, data: str, mib: int, seconds: float | None, images: float | None
) -> Reported:
    return Reported(
        report=report,
        line=line,
        data=data,
        memory_mib=(mib,) * 8,
        epoch_seconds=seconds,
        images_per_second=images,
    )


RUNS = (
    Run(
        name="OneFlow AlexNet, data parallel",
        model="alexnet_oneflow",
        batch=2016,
        reported=(
            Reported(
                report="000",
                line=3,
                data="synthetic",
                memory_mib=_even(2615),
                epoch_seconds=76.12,
                images_per_second=16844.1,
                utilisation=(99, 99, 99, 99, 99, 99, 100, 99),
            ),
            Reported(
                report="001",
                line=168,
                data="synthetic",
                memory_mib=_even(3535, first=2789),
                epoch_seconds=76.251,
                images_per_second=16815.2,
            ),
            Reported(
                report="002",
                line=41,
                data="real",
                memory_mib=_even(4713, first=3967),
                epoch_seconds=96.56,
                images_per_second=13278.5,
                utilisation=(98, 88, 98, 95, 87, 87, 96, 81),
            ),
        ),
    ),
    Run(
        name="OneFlow AlexNet, 15:1",
        model="alexnet_oneflow",
        batch=2016,
        placement=_SEVEN_TO_ONE,
        shares=(15, 1),
        reported=_ALEXNET_15,
    ),
    Run(
        name="OneFlow AlexNet, 15:1, no static order",
        model="alexnet_oneflow",
        batch=2016,
        placement=_SEVEN_TO_ONE,
        shares=(15, 1),
        has_static_order=False,
    ),
    Run(
        name="OneFlow AlexNet, 3:1",
        model="alexnet_oneflow",
        batch=2016,
        placement=_SEVEN_TO_ONE,
        shares=(3, 1),
        reported=_ALEXNET_3,
    ),
    Run(
        name="PipeDream AlexNet, data parallel",
        model="alexnet",
        batch=2048,
        reported=(
            Reported(
                report="001",
                line=39,
                data="synthetic",
                memory_mib=(4667, 4679, 4679, 4679, 4667, 4679, 4679, 4679),
                epoch_seconds=144.396,
                images_per_second=6921.4,
            ),
        ),
    ),
    Run(
        name="PipeDream AlexNet, 7:1",
        model="alexnet",
        batch=1792,
        placement=_SEVEN_TO_ONE,
        cut_at="classifier",
        is_round_robin=True,
        reported=(
            Reported(
                report="001",
                line=40,
                data="synthetic",
                memory_mib=(5047, 4871, 4871, 4871, 4871, 5047, 5047, 2151),
                epoch_seconds=102.291,
                images_per_second=9775.4,
            ),
        ),
    ),
    Run(
        name="OneFlow VGG16, data parallel",
        model="vgg16",
        batch=224,
        reported=(
            Reported(
                report="001",
                line=167,
                data="real",
                memory_mib=_even(8293, first=6349),
                epoch_seconds=1847.705,
                images_per_second=693.4,
                note="the table has 8639 MiB, nvidia-smi 8293",
            ),
            Reported(
                report="002",
                line=36,
                data="synthetic",
                memory_mib=_even(7179, first=5235),
                epoch_seconds=1850.54,
                images_per_second=692.4,
                utilisation=(100, 100, 99, 99, 99, 99, 100, 99),
            ),
        ),
    ),
    Run(
        name="OneFlow VGG16, 11:7",
        model="vgg16",
        batch=224,
        placement=_SEVEN_TO_ONE,
        shares=(11, 7),
        reported=_VGG_11,
    ),
    Run(
        name="OneFlow VGG16, 11:7, no static order",
        model="vgg16",
        batch=224,
        placement=_SEVEN_TO_ONE,
        shares=(11, 7),
        has_static_order=False,
    ),
    Run(
        name="PipeDream VGG16, data parallel, 32 each",
        model="vgg16",
        batch=256,
        reported=(
            Reported(
                report="001",
                line=43,
                data="real",
                memory_mib=(11675, 11687, 11687, 11687, 11675, 11687, 11687, 11687),
                epoch_seconds=2647.071,
                images_per_second=483.9,
                note="as much as with 64 each: what the allocator holds, not what is needed",
            ),
        ),
    ),
    Run(
        name="PipeDream VGG16, data parallel, 64 each",
        model="vgg16",
        batch=512,
        reported=(
            Reported(
                report="001",
                line=41,
                data="real",
                memory_mib=(11769, 11845, 11845, 11845, 11833, 11849, 11849, 11849),
                epoch_seconds=2430.059,
                images_per_second=527.2,
            ),
        ),
    ),
    Run(
        name="PipeDream VGG16, 7:1",
        model="vgg16",
        batch=224,
        placement=_SEVEN_TO_ONE,
        cut_at="features.23",
        is_round_robin=True,
        reported=(
            Reported(
                report="001",
                line=42,
                data="real",
                memory_mib=(7907, 7907, 7887, 7887, 7907, 7907, 7887, 5439),
                epoch_seconds=1644.832,
                images_per_second=778.8,
            ),
        ),
    ),
    Run(
        name="OneFlow ResNet-50, data parallel",
        model="resnet50",
        batch=1024,
        local="0:0-1",
        reported=(
            _resnet("001", 351, "real", 7877, 281.537, 4553.7),
            _resnet("001", 352, "real, one stage", 7877, 287.0098, 4466.9),
            _resnet("001", 355, "synthetic", 6735, 288.564, 4442.9),
            _resnet("001", 356, "synthetic, one stage", 6749, 281.435, 4555.4),
            _resnet("002", 38, "unstated, one stage", 7875, 282.71, 4534.9),
        ),
    ),
    Run(
        name="OneFlow ResNet-50, 1:50",
        model="resnet50",
        batch=1024,
        placement=_TWO_NODES,
        local="0:0-1.0:0-1",
        shares=(1, 50),
        reported=(_resnet("002", 39, "unstated", 8315, 286.91, 4468.5),),
    ),
    Run(
        name="OneFlow ResNet-50, 1:30",
        model="resnet50",
        batch=1024,
        placement=_TWO_NODES,
        local="0:0-1.0:0-1",
        shares=(1, 30),
        reported=(_resnet("001", 353, "real", 8325, 376.589, 3404.4),),
    ),
    Run(
        name="OneFlow ResNet-50, 1:10",
        model="resnet50",
        batch=1024,
        placement=_TWO_NODES,
        local="0:0-1.0:0-1",
        shares=(1, 10),
        reported=(
            _resnet("001", 354, "real", 8867, 330.723, 3876.5),
            _resnet("001", 357, "synthetic", 7857, 324.634, 3949.2),
        ),
    ),
    Run(
        name="OneFlow ResNet-50, 1:5",
        model="resnet50",
        batch=1024,
        placement=_TWO_NODES,
        local="0:0-1.0:0-1",
        shares=(1, 5),
        reported=(
            _resnet("001", 358, "synthetic", 8983, 328.287, 3905.3),
            _resnet("001", 311, "synthetic, another revision", 8983, None, None),
        ),
    ),
)
