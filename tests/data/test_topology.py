"""Texts of `nvidia-smi topo -m` of many years, and what is no such text."""

from pathlib import Path

import pytest

from bayplan.data.cluster import LinkKind
from bayplan.data.errors import FileFault
from bayplan.data.topology import read_topology

FOLDER = Path(__file__).parent / "topologies"


def topology(name):
    return read_topology((FOLDER / f"{name}.txt").read_text(), name=name)


def words_of(found, row):
    return " ".join("X" if kind is None else kind for kind in found.kinds[row])


# Reports 001 and 002 print the same text; one case is that, the other has a document around it.
@pytest.mark.parametrize("name", ["titanv-8", "titanv-8-in-a-document"])
def test_the_topology_of_the_reports(name):
    found = topology(name)
    assert words_of(found, 0) == "X PIX PHB PHB SYS SYS SYS SYS"
    assert words_of(found, 5) == "SYS SYS SYS SYS PIX X PHB PHB"
    assert found.affinities == ("0-13,28-41",) * 4 + ("14-27,42-55",) * 4
    assert found.cards == ()
    assert found.nearest_card == (None,) * 8


def test_cards_numa_columns_and_an_underlined_head():
    found = topology("h100-8-with-cards")
    assert found.num_devices == 8
    assert {found.nvlinks[0][other] for other in range(1, 8)} == {18}
    assert found.affinities[0] == "0-55,112-167"
    assert found.cards == tuple(f"NIC{card}" for card in range(10))
    assert found.nearest_card == (0, 3, 4, 5, 6, 7, 8, 9)


def test_nvlinks_are_counted():
    found = topology("dgx-1-v100")
    assert found.nvlinks[0] == (0, 1, 1, 2, 2, 0, 0, 0)
    assert words_of(found, 0) == "X NVLINK NVLINK NVLINK NVLINK SYS SYS SYS"
    assert found.cards == ("mlx5_0", "mlx5_2", "mlx5_1", "mlx5_3")


def test_columns_parted_by_spaces():
    found = topology("a100-8-with-bridges")
    assert words_of(found, 2) == "NODE NODE X NVLINK SYS SYS SYS SYS"
    assert found.affinities[7] == "32-63,96-127"


def test_what_old_drivers_call_soc_is_sys():
    assert words_of(topology("old-driver-4"), 0) == "X PIX SYS SYS"


def test_a_gpu_alone():
    found = topology("one-gpu")
    assert found.kinds == ((None,),)
    assert found.affinities == ("0-11",)


def test_affinity_that_is_not_said_is_empty():
    found = read_topology("GPU0 GPU1 CPU Affinity\nGPU0 X SYS N/A\nGPU1 SYS X N/A")
    assert found.affinities == ("", "")
    assert found.kinds[0][1] is LinkKind.SYS


PAIR = """\
\tGPU0\tGPU1\tCPU Affinity
GPU0\t X \tPIX\t0-7
GPU1\tPIX\t X \t0-7
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "text is empty; expected the text that `nvidia-smi topo -m` prints"),
        ("\n\nno GPUs here\n", "text, line 3: 'no GPUs here' and what follows is no topology"),
        (
            "========= ROCm System Management Interface =========\n       GPU0   GPU1\n",
            "text, line 2: no row for GPU0",
        ),
        (PAIR.replace("CPU Affinity", "Weather"), "text, line 1: column 'Weather' is neither"),
        (PAIR.replace("GPU1\t", "GPU0\t", 1), "text, line 1: names GPU0 twice"),
        (PAIR.replace("GPU1", "GPU3"), "line 1: GPUs are GPU0, GPU3, must count from GPU0"),
        (
            PAIR.replace("\tPIX\t0-7", "\tWIFI\t0-7"),
            "line 2: GPU0 to GPU1 is 'WIFI'; known are NV1",
        ),
        (PAIR.replace("\tPIX\t0-7", "\tSYS\t0-7"), "line 2: GPU0 to GPU1 is SYS, but GPU1 to GPU0"),
        (PAIR.replace(" X ", "PIX", 1), "text, line 2: GPU0 to GPU0 is 'PIX', X is a device to"),
        (PAIR.replace("GPU1\tPIX\t X \t0-7", ""), "text, line 1: no row for GPU1, which this line"),
        (PAIR.removesuffix("\t X \t0-7\n"), "line 3: 1 entries for 2 columns; the line is cut"),
        (PAIR + "GPU1\tPIX\t X \n", None),  # behind the matrix, and not looked at
        (PAIR.replace("GPU1\tPIX", "GPU0\tPIX"), "text, line 3: a second row for GPU0"),
        (PAIR.replace("GPU1\tPIX", "TPU1\tPIX"), "text, line 3: row 'TPU1' is not one of the"),
    ],
)
def test_a_text_never_seen_is_refused_with_its_line(text, message):
    if message is None:
        assert read_topology(text, name="text").num_devices == 2
        return
    with pytest.raises(FileFault) as refusal:
        read_topology(text, name="text")
    assert message in str(refusal.value)


def test_a_matrix_cut_off_anywhere_is_refused_or_whole():
    text = (FOLDER / "titanv-8.txt").read_text()
    end = text.index(" X \t14-27,42-55\n\nLegend") + 1  # before the last entry
    for length in range(end):
        with pytest.raises(FileFault):
            read_topology(text[:length])
    assert read_topology(text[: end + 1]).num_devices == 8
