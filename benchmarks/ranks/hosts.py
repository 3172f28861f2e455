"""Two hosts on one machine: network namespaces with a slow link between them.

Ranks of one host talk through its loopback at full speed. Both ends of the link are shaped, so
either direction has the whole rate. Delay is not emulated.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Host", "HostsUnavailable", "two_hosts"]

_RATE = "500mbit"
_INTERFACE = "between"


class HostsUnavailable(RuntimeError):
    """Namespaces cannot be made here, and why."""


@dataclass(frozen=True)
class Host:
    """A namespace, its address, and its end of the link."""

    name: str
    address: str
    interface: str = _INTERFACE


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts, and remove them afterwards, whatever happens."""
    if os.geteuid() != 0:
        raise HostsUnavailable("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise HostsUnavailable(f"`{tool}` is missing; install iproute2")
    # Addresses of a block that is reserved for documentation, so that no real host is meant.
    first, second = (
        Host(f"bayplan-bench-{os.getpid()}-{at}", f"192.0.2.{at + 1}") for at in range(2)
    )
    try:
        _make(first, second)
        yield first, second
    finally:
        for host in (first, second):
            # The link goes with its ends.
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def _make(first: Host, second: Host) -> None:
    for host in (first, second):
        _run(f"ip netns add {host.name}")
        _run(f"ip -n {host.name} link set lo up")
    _run(
        f"ip link add {_INTERFACE} netns {first.name} type veth"
        f" peer name {_INTERFACE} netns {second.name}"
    )
    for host in (first, second):
        _run(f"ip -n {host.name} address add {host.address}/24 dev {_INTERFACE}")
        _run(f"ip -n {host.name} link set {_INTERFACE} up")
        _run(
            f"tc -n {host.name} qdisc add dev {_INTERFACE} root tbf"
            f" rate {_RATE} burst 256kb latency 50ms"
        )


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsUnavailable(f"`{command}` fails: {done.stderr.strip()}")
