"""The shipped device descriptions: complete, sourced, and in a believable order."""

import msgspec
import pytest
import yaml

from bayplan.costing.catalogue import device_names, load_device
from bayplan.data.device import DeviceKind, OpClass
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.files import write

EXPECTED_NAMES = """
    a10 a100 a100-80gb a6000 b200 h100 h100-pcie h200 l4 mi300x p100 rtx-2080-ti rtx-3090
    rtx-4090 rtx-5090 rtx-pro-6000 t4 titan-v v100 v100-32gb
"""
DTYPES = {"float64", "float32", "tf32", "float16", "bfloat16"}
GIB = 2**30


def figures(device):
    yield from (device.memory_bytes, device.context_bytes, device.bandwidth_bytes_per_s)
    yield from (device.vector_flops_per_s, device.launch_seconds)
    yield from device.flops_per_s.values()
    yield from device.efficiency.values()


def described_in(device):
    fields = msgspec.to_builtins(device)
    fields["efficiency"] = {str(kind): figure for kind, figure in fields["efficiency"].items()}
    return fields


def test_names_are_sorted_and_complete():
    assert device_names() == tuple(EXPECTED_NAMES.split())


@pytest.mark.parametrize("name", EXPECTED_NAMES.split())
def test_every_file_loads_under_its_name(name):
    device = load_device(name)
    assert device.name == name
    assert device.title
    assert set(device.efficiency) == set(OpClass)


@pytest.mark.parametrize("name", EXPECTED_NAMES.split())
def test_every_figure_says_where_it_comes_from(name):
    known = (
        "data sheet",
        "guess",
        "fit to published reports",
        "published tables",
        "total capacity",
    )
    device = load_device(name)
    assert all(f.source.startswith((*known, "by definition")) for f in figures(device))
    assert device.bandwidth_bytes_per_s.source.startswith("data sheet")
    assert device.vector_flops_per_s.source.startswith("data sheet")


@pytest.mark.parametrize("name", EXPECTED_NAMES.split())
def test_figures_are_of_a_believable_size(name):
    device = load_device(name)
    assert 10 * GIB < device.memory_bytes.value < 200 * GIB
    assert 0.2 * GIB < device.context_bytes.value < 1.5 * GIB
    assert 2e11 < device.bandwidth_bytes_per_s.value < 1e13
    assert 1e-6 < device.launch_seconds.value < 2e-5
    assert set(device.flops_per_s) <= DTYPES
    rates = {dtype: figure.value for dtype, figure in device.flops_per_s.items()}
    assert 5e12 < rates["float32"] < 2e14
    assert rates["float64"] <= rates["float32"] <= rates.get("tf32", rates["float32"])
    assert rates.get("tf32", 0) <= rates["float16"] <= 3e15
    assert rates.get("bfloat16", rates["float16"]) == rates["float16"]
    assert device.vector_flops_per_s.value <= rates["float32"]


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ("p100", "v100"),
        ("titan-v", "v100"),
        ("v100", "a100"),
        ("a100", "a100-80gb"),
        ("a100-80gb", "h100"),
        ("h100-pcie", "h100"),
        ("h100", "h200"),
        ("rtx-2080-ti", "rtx-3090"),
        ("rtx-3090", "rtx-4090"),
        ("rtx-4090", "rtx-5090"),
        ("t4", "l4"),
        ("l4", "a10"),
        ("a10", "a6000"),
    ],
)
def test_order_of_what_devices_really_reach(slower, faster):
    low, high = load_device(slower), load_device(faster)

    def reached_flops(device, dtype):
        return device.flops_per_s[dtype].value * device.efficiency[OpClass.MATMUL].value

    def reached_bandwidth(device):
        share = device.efficiency[OpClass.ELEMENTWISE].value
        return device.bandwidth_bytes_per_s.value * share

    assert reached_flops(low, "float16") <= reached_flops(high, "float16")
    # The slack is for T4 and L4: more arithmetic, about the same bandwidth.
    assert reached_bandwidth(low) <= 1.05 * reached_bandwidth(high)


def test_devices_without_tensor_cores_for_it_list_neither_bfloat16_nor_tf32():
    for name in ("p100", "titan-v", "v100", "v100-32gb", "rtx-2080-ti", "t4"):
        assert not {"bfloat16", "tf32"} & set(load_device(name).flops_per_s)


def test_memory_variants_differ_in_memory():
    assert load_device("v100-32gb").memory_bytes.value > load_device("v100").memory_bytes.value
    assert load_device("a100-80gb").memory_bytes.value > load_device("a100").memory_bytes.value
    assert load_device("titan-v").memory_bytes.value == 12066 * 2**20


def test_capitals_do_not_matter():
    assert load_device("TITAN-V") == load_device("titan-v")


def test_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match=r"no device 'titanv'.*did you mean 'titan-v'\?"):
        load_device("titanv")


@pytest.mark.parametrize("name", ["zzzzzz", ""])
def test_hopeless_name_is_answered_with_all(name):
    with pytest.raises(UsageError, match=r"known: a10, a100,.*path of a YAML file"):
        load_device(name)


def test_own_yaml_and_json_files(tmp_path):
    mine = msgspec.structs.replace(load_device("v100"), name="mine")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(described_in(mine)))
    write(tmp_path / "mine.json", mine)
    assert load_device(tmp_path / "mine.yaml") == mine
    assert load_device(str(tmp_path / "mine.json")) == mine


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileFault, match=r"cannot read .*absent\.yaml: No such file"):
        load_device(tmp_path / "absent.yaml")


def test_unknown_field_is_named(tmp_path):
    fields = described_in(load_device("v100"))
    fields["turbo"] = 1
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(fields))
    with pytest.raises(FileFault, match=r"mine\.yaml: .*unknown field `turbo`"):
        load_device(tmp_path / "mine.yaml")


def test_wrong_figure_is_named_with_its_place(tmp_path):
    fields = described_in(load_device("v100"))
    fields["efficiency"]["matmul"]["value"] = "fast"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(fields))
    with pytest.raises(FileFault, match=r"Expected `float`.*\$\.efficiency\[\.\.\.\]\.value"):
        load_device(tmp_path / "mine.yaml")


def test_efficiency_above_one_is_refused(tmp_path):
    fields = described_in(load_device("v100"))
    fields["efficiency"]["matmul"]["value"] = 1.2
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(fields))
    with pytest.raises(FileFault, match=r"efficiency of matmul is 1\.2"):
        load_device(tmp_path / "mine.yaml")


def test_other_kind_of_file_is_refused(tmp_path):
    (tmp_path / "cluster.yaml").write_text("schema: bayplan/cluster\nversion: 1\n")
    with pytest.raises(FileFault, match="schema is 'bayplan/cluster', expected 'bayplan/device'"):
        load_device(tmp_path / "cluster.yaml")


def test_loaded_type_is_the_noun():
    assert type(load_device("h100")) is DeviceKind
