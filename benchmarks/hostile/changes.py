"""Changes to files: of the tree of values that a JSON file is, and of any file's bytes."""

import copy
import json
import random
from typing import Any

__all__ = ["changed"]

# What programmers forget: limits of integers and floats, no value, another type, markup, paths.
_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2**31, 2**53 + 1, 2**63, -(2**63), 10**30, 1e308, -1e308, 1e-320, 0.5),
    *(float("nan"), float("inf"), -float("inf"), None, True, False, "", [], {}, [[]], [None]),
    *("a" * 5000, "\x00", "\ud800", "\u202e", "<script>alert(1)</script>", "../../etc/passwd"),
    *("${HOME}", "!!python/object/apply:os.system ['true']", "0", "-0", "1e400", "nan"),
)
_WORDS = (
    *(b"\x00", b"\xff\xfe", b"[", b"{", b'"', b":", b",", b"-", b".", b"999999999999", b"1e999"),
    *(b"GPU", b"NV", b"&a", b"*a", b"<<: *a", b"!!python/name:os.system", b"\n", b"\t", b"  "),
    *(b"%", b"GiB", b"0:0-", b"0-4294967295", "٣".encode(), b"\x1b[4m", b"#", b"'", b"|"),
)


def changed(seed: bytes, chance: random.Random) -> bytes:
    """One to eight changes of a file, of its values where it is JSON, or of its bytes."""
    if seed[:1] == b"{" and chance.random() < 0.75:
        tree = json.loads(seed)
        for _ in range(chance.choice((1, 1, 1, 2, 4, 8))):
            tree = _changed_tree(tree, chance)
        return json.dumps(tree).encode("utf-8", "surrogatepass")
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        seed = _changed_bytes(seed, chance)
    return seed


def _changed_tree(tree: Any, chance: random.Random) -> Any:
    """Walk down to some place, and put something else there."""
    parent: Any = None
    key: Any = None
    value = tree
    while isinstance(value, dict | list) and value and (parent is None or chance.random() < 0.85):
        parent = value
        key = chance.choice([*value]) if isinstance(value, dict) else chance.randrange(len(value))
        value = value[key]
    if parent is None:
        return copy.deepcopy(chance.choice(_VALUES))
    way = chance.randrange(8)
    if way == 0:
        del parent[key]
    elif way == 1 and isinstance(parent, list):
        parent.insert(key, value)
    elif way == 2 and isinstance(parent, dict):
        parent[chance.choice(("", "unknown", f"{key}s"))] = parent.pop(key)
    elif way == 3:
        nested: Any = value
        for _ in range(chance.choice((1, 3, 100))):
            nested = [nested]
        parent[key] = nested
    elif way in (4, 5) and isinstance(value, int | float):
        parent[key] = value + chance.choice((-1, 1, 1000)) if way == 4 else value * 1000
    elif way == 6:
        other = chance.choice([*parent] if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]
    else:
        parent[key] = copy.deepcopy(chance.choice(_VALUES))
    return tree


def _changed_bytes(text: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(text) + 1)
    end = min(len(text), start + chance.choice((0, 1, 4, 40)))
    way = chance.randrange(6)
    if way == 0:  # cut off
        return text[:start]
    if way == 1:  # flipped
        return text[:start] + bytes(chance.randrange(256) for _ in range(end - start)) + text[end:]
    if way == 2:  # left out
        return text[:start] + text[end:]
    if way == 3:  # said twice
        return text[:end] + text[start:]
    if way == 4:  # said too often
        return text[:end] + text[start:end] * chance.choice((10, 1000)) + text[end:]
    return text[:start] + chance.choice(_WORDS) + text[end:]
