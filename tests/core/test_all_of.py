"""Schemas that are merged take what both take, as another validator sees it."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tokenmill.core.json_schema import enforceable, look_up, merged

NAMES = st.sampled_from(["a", "b", "c"])
NUMBERS = st.integers(0, 4)
KINDS = st.sampled_from(["string", "integer", "number", "null", "array", "object"])
SMALL = st.sampled_from([{}, {"type": "integer"}, {"maximum": 2}, True, False])
NODES = st.fixed_dictionaries(
    {},
    optional={
        "type": KINDS | st.lists(KINDS, min_size=1, max_size=3, unique=True),
        "enum": st.lists(
            st.sampled_from([0, 1, "a", None, [], {"a": 1}]), min_size=1, unique_by=str
        ),
        "minimum": NUMBERS,
        "maximum": NUMBERS,
        "minLength": NUMBERS,
        "maxItems": NUMBERS,
        "minProperties": NUMBERS,
        "properties": st.dictionaries(NAMES, SMALL, max_size=2),
        "required": st.lists(NAMES, max_size=2, unique=True),
        "additionalProperties": SMALL,
        "patternProperties": st.dictionaries(NAMES, SMALL, max_size=1),
        "items": SMALL,
        "prefixItems": st.lists(SMALL, min_size=1, max_size=2),
        "not": st.just({"type": "null"}),
        "title": NAMES,
    },
)
VALUES = st.recursive(
    st.none() | st.integers(-1, 5) | st.floats(0, 5) | st.sampled_from(["", "a", "abc"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=200)
@given(NODES, NODES, st.lists(VALUES, min_size=8, max_size=8))
def test_a_merged_schema_takes_what_both_take(
    one: dict[str, Any], other: dict[str, Any], values: list[Any]
) -> None:
    both = merged(one, other)
    assume(both is not None)
    checks = [jsonschema_rs.validator_for(schema) for schema in (both, one, other)]
    for value in values:
        taken, *apart = (check.is_valid(value) for check in checks)
        assert taken == all(apart), (both, value)


@settings(max_examples=200)
@given(st.lists(NODES, min_size=1, max_size=3), NODES, VALUES)
def test_what_is_said_in_other_words_refuses_no_less(
    parts: list[dict[str, Any]], beside: dict[str, Any], value: Any
) -> None:
    """Where nothing is left out, a value that the new words take is one that the old ones take."""
    schema = beside | {"allOf": parts}
    read, found = enforceable(schema)
    if not found and jsonschema_rs.is_valid(read, value):
        assert jsonschema_rs.is_valid(schema, value)


def test_references_are_looked_up_by_their_pointer() -> None:
    root = {"$defs": {"a/b": {"x": 1}, "~": 2}}
    assert look_up(root, "#/$defs/a~1b") == {"x": 1}
    assert look_up(root, "#/$defs/~0") == 2 and look_up(root, "#") is root
    assert look_up(root, "#/$defs/none") is None is look_up(root, "https://example.com/a")
