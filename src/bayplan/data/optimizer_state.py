"""How much state an optimizer keeps, for plans that are made before there is an optimizer."""

__all__ = ["state_per_parameter"]

_PER_PARAMETER = {"none": 0.0, "sgd": 1.0, "adam": 2.0, "adamw": 2.0}
_MOST = 2.0


def state_per_parameter(optimizer: str) -> float:
    """Bytes of state for a byte of parameters, by the optimizer's name; of an unknown one, most.

    Example:
        >>> state_per_parameter("sgd"), state_per_parameter("adamw")
        (1.0, 2.0)
    """
    return _PER_PARAMETER.get(optimizer, _MOST)
