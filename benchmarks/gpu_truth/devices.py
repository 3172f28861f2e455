"""Which device of the catalogue a row means by its own words."""

import re

from bayplan.costing.catalogue import device_names, load_device
from bayplan.data.device import DeviceKind
from bayplan.data.errors import UsageError

__all__ = ["architecture_of", "device_of"]

ANY_ARCHITECTURE = "sm_80"  # where nobody says which GPU it was: memory hardly depends on it
# Words in the order of trial: the first that are all in a text decide.
_WORDS = {
    "rtx-pro-6000-max-q": ("pro 6000", "max-q"),
    "rtx-pro-6000": ("pro 6000",),
    "b200": ("b200",),
    "h200": ("h200",),
    "h100-pcie": ("h100", "pcie"),
    "h100": ("h100",),
    "a100-80gb": ("a100 80",),
    "a100": ("a100",),
    "a10g": ("a10g",),
    "a10": ("a10",),
    "v100-32gb": ("v100", "32"),
    "v100": ("v100",),
    "p100": ("p100",),
    "p40": ("p40",),
    "t4": ("t4",),
    "l4": ("l4",),
    "rtx-5090": ("5090",),
    "rtx-4090": ("4090",),
    "rtx-3090": ("3090",),
    "rtx-2080-ti": ("2080",),
    "titan-xp": ("titan xp",),
    "titan-v": ("titan v",),
    "a6000": ("a6000",),
}


def device_of(text: str) -> DeviceKind:
    """The device that a text names; refused where it names none, or one we do not know."""
    lowered = re.sub(r"[^a-z0-9 -]+", " ", text.lower())
    if text.lower().startswith(("not stated", "not certain")):
        raise UsageError(f"the GPU is not told ({text})")
    for name, words in _WORDS.items():
        if all(word in lowered for word in words):
            if name not in device_names():
                raise UsageError(f"the catalogue has no {name}")
            return load_device(name)
    raise UsageError(f"no device of the catalogue is called {text!r}")


def architecture_of(text: str) -> str:
    """The architecture of the GPU that a text names, or one that stands for any."""
    try:
        return device_of(text).architecture or ANY_ARCHITECTURE
    except UsageError:
        return ANY_ARCHITECTURE
