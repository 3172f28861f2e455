"""What does an integration add to a training step? Fitted by the framework's line over by hand.

Both trainings run the same plan, so what differs is the integration: its hooks, its clock, and the
meter of peaks. Rounds of plain framework steps are interleaved, one thread, processor time.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
"""
