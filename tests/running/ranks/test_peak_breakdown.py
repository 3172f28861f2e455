"""What fills a rank's memory, by kind."""

import torch

from bayplan.devices.machine import cache_directory
from bayplan.devices.meters import open_meter
from bayplan.running.ranks.journal import PeakBreakdown

KIB = 1024


class Meter:
    """Counts what a test says."""

    method = "told"
    live_bytes = 0
    peak_bytes = 0

    def reset_peak(self):
        self.peak_bytes = 0


def test_the_fullest_action_is_told_with_what_was_there_as_it_began():
    meter, weight = Meter(), torch.zeros(KIB, dtype=torch.uint8)
    held = [("parameter", weight), ("activation", weight[:10])]  # the same memory counts once
    breakdown = PeakBreakdown(lambda: held, meter)
    for size, peak_bytes in ((2 * KIB, 100), (3 * KIB, 900), (5 * KIB, 300)):
        extra = torch.zeros(size, dtype=torch.uint8)
        held[1:] = [("activation", weight[:10]), ("message", extra)]
        breakdown.began(0)
        meter.peak_bytes = peak_bytes
        breakdown.ended(0)
    assert breakdown.by_kind(6 * KIB) == {
        "message": 3 * KIB,
        "temporary": 2 * KIB,
        "parameter": KIB,
    }


def test_a_real_meter_finds_the_action_that_allocates_most():
    kept = []
    with open_meter(torch.device("cpu"), cache_directory()) as meter:
        breakdown = PeakBreakdown(lambda: kept, meter)
        for number, size in enumerate((KIB, 4096 * KIB, 2 * KIB)):
            breakdown.began(number)
            torch.zeros(size, dtype=torch.uint8)
            breakdown.ended(number)
            kept.append(("activation", torch.zeros(KIB, dtype=torch.uint8)))
    assert breakdown.by_kind(4097 * KIB) == {"temporary": 4096 * KIB, "activation": KIB}
