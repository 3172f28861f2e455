"""What a figure needs beside it to mean something later."""

import platform

import torch

from bayplan.devices.machine import cache_directory, describe_machine


def test_description_names_what_times_depend_on():
    machine = describe_machine()
    assert machine["torch"] == torch.__version__
    assert machine["python"] == platform.python_version()
    assert machine["threads"] == str(torch.get_num_threads())
    assert all(isinstance(word, str) and word for word in machine.values())
    assert set(machine) == {
        *("bayplan", "torch", "python", "system", "processor", "cores", "threads")
    }


def test_description_follows_the_number_of_threads():
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert describe_machine()["threads"] == "1"
    finally:
        torch.set_num_threads(num_threads)


def test_description_names_settings_that_choose_other_kernels(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    told = describe_machine()
    assert told["float32 matmul"] == "medium"
    assert told["algorithms"] == "deterministic"


def test_processor_is_unknown_rather_than_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr("bayplan.devices.machine.Path", lambda path: tmp_path / "nothing there")
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert describe_machine()["processor"] == "unknown"


def test_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path / "chosen"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_directory() == tmp_path / "chosen"
    monkeypatch.delenv("BAYPLAN_CACHE")
    assert cache_directory() == tmp_path / "xdg" / "bayplan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == tmp_path / "home" / ".cache" / "bayplan"
    assert not list(tmp_path.iterdir())  # asking makes no folder
