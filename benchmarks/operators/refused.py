"""The operators that no plan takes, and why. `docs/operators.md` shows this list.

An operator is here if any of its samples in torch's database is refused.
"""

__all__ = ["REFUSED"]

_SPARSE = "the memory of a sparse tensor depends on values"
_SIZE = "the size of its output depends on values"

REFUSED = {
    "index_fill": "with a trained value and a tensor of indices: backward looks for repeated ones",
    "index_put": "with a mask and trained values: how many are put depends on the mask",
    "linalg.lstsq": "the size of its residuals depends on the rank",
    "linalg.lstsq.grad_oriented": "the size of its residuals depends on the rank",
    "masked_select": _SIZE,
    "narrow": "with a tensor as start, whose value must be known",
    "nn.functional.gaussian_nll_loss": "asks on the way whether a variance is negative",
    "sparse.mm.reduce": _SPARSE,
    "sparse.sampled_addmm": _SPARSE,
    "tensor_split": "by a tensor, whose values must be known",
    "to_sparse": _SPARSE,
    "nn.GaussianNLLLoss": "asks on the way whether a variance is negative",
}
