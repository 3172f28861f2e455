"""The doctor: good here, and what it says where something is missing."""

import msgspec
import pytest
import torch

from bayplan.costing.catalogue import cluster_names, device_names
from bayplan.data.verdict import Finding
from bayplan.devices import malloc_counter
from bayplan.devices.malloc_counter import MallocCounter, MeterUnavailable
from bayplan.models import reference_models
from bayplan.running import doctor


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache, monkeypatch):
    monkeypatch.setenv("BAYPLAN_CACHE", str(cache))


def examined() -> dict[str, Finding]:
    return {finding.subject: finding for finding in doctor.examine()}


def test_this_machine_is_good():
    findings = examined()
    assert all(finding.is_good for finding in findings.values()), findings
    assert all(finding.change == "" for finding in findings.values())
    assert "saw 8.0 MiB of a block of 8.0 MiB" in findings["memory"].found
    assert findings["torch"].found == torch.__version__
    assert "0 profiles" in findings["cache"].found
    assert "(BAYPLAN_CACHE)" in findings["cache"].found


def test_all_that_is_known_is_listed():
    findings = examined()
    assert findings["models"].found.split(", ") == list(reference_models())
    assert findings["devices"].found.split(", ") == list(device_names())
    assert findings["clusters"].found.split(", ") == list(cluster_names())


def test_cache_that_cannot_be_written_is_advice(tmp_path, monkeypatch):
    """It costs time and no result: profiles are not kept, and memory is counted all the same."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(malloc_counter, "_library", None)
    findings = examined()
    assert all(finding.is_good for finding in findings.values())
    assert "counted by malloc" in findings["memory"].found
    assert str(tmp_path / "file") in findings["cache"].found
    assert "cannot be written" in findings["cache"].found
    assert findings["cache"].change == "set BAYPLAN_CACHE to a folder that can"


def test_no_compiler_is_bad_with_the_reason(monkeypatch):
    def refuse(cache):
        raise MeterUnavailable("malloc counter: no C compiler (cc, gcc, clang) on PATH")

    monkeypatch.setattr(MallocCounter, "attach", refuse)
    finding = examined()["memory"]
    assert not finding.is_good
    assert "no C compiler" in finding.found
    assert finding.change == "install a C compiler (gcc)"


def test_allocator_that_hides_its_blocks_is_bad(monkeypatch):
    monkeypatch.setattr(MallocCounter, "live_bytes", property(lambda counter: 0))
    finding = examined()["memory"]
    assert not finding.is_good
    assert "saw 0 B" in finding.found
    assert "LD_PRELOAD" in finding.change


@pytest.mark.parametrize(
    ("version", "is_good"), [("2.13.1+cu128", True), ("2.12.0", False), ("2.130.0", False)]
)
def test_other_release_of_torch_is_told(monkeypatch, version, is_good):
    monkeypatch.setattr(torch, "__version__", version)
    finding = examined()["torch"]
    assert finding.is_good is is_good
    assert ("install torch 2.13" in finding.change) is not is_good


def test_kept_profiles_are_counted(cache):
    (cache / "profiles").mkdir()
    (cache / "profiles" / "a.json").write_text("{}")
    try:
        assert examined()["cache"].found.endswith(", 1 profile")
    finally:
        (cache / "profiles" / "a.json").unlink()
        (cache / "profiles").rmdir()


def test_findings_are_printed_as_json(bayplan):
    outcome = bayplan("doctor", "--json")
    assert outcome.code == 0
    printed = msgspec.json.decode(outcome.out, type=list[Finding])
    assert {finding.subject for finding in printed} == examined().keys()
