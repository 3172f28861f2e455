"""YAML as people write it, without surprises: no objects, no explosions, `12e9` is a number.

A file of its own because importing yaml takes a tenth of the time that `--help` has.
"""

import re

import yaml

__all__ = ["YamlFault", "dump_yaml", "load_yaml"]

YamlFault = yaml.YAMLError


class _Loader(yaml.SafeLoader):
    """Merges `<<` mappings without repeating entries, so that nested merges cannot explode."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        last = {id(key): (key, value) for key, value in reversed(node.value)}
        node.value = list(reversed(last.values()))


# YAML 1.1 takes `12e9` for a word, because it has no dot.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def load_yaml(content: bytes) -> object:
    """Read a document, or raise YamlFault."""
    try:
        return yaml.load(content, Loader=_Loader)
    except (ValueError, KeyError, AttributeError) as fault:
        # PyYAML lets these escape for scalars such as `2024-99-99` or `!!bool x`.
        raise YamlFault(f"a value cannot be read: {fault}") from fault


def dump_yaml(fields: object) -> str:
    """Write a document that a person goes on writing.

    Lists and mappings of mere values stay on one line, so that a figure is a line.
    """
    return yaml.safe_dump(
        fields, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None
    )
