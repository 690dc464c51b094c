"""Dataclasses as JSON: what goes in comes out, and what has no JSON form is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import pytest

from tokenmill.core.codec import dumps, loads


class Colour(Enum):
    RED = "red"


@dataclass
class Leaf:
    data: bytes = b"\x00\xff"
    colour: Colour | None = Colour.RED


@dataclass
class Other:
    kind: Literal["a", "b"] = "a"


@dataclass
class Tree:
    leaves: list[Leaf | Other | None] = field(default_factory=lambda: [Leaf(), None, Other("b")])
    children: tuple[Tree, ...] = ()
    pair: tuple[int, Leaf] = field(default_factory=lambda: (3, Leaf(colour=None)))
    counts: dict[int, float] = field(default_factory=lambda: {-1: 0.5})
    sizes: tuple[int, ...] = (1, 2)
    name: int | str | None = "x"
    leaf: Leaf | None = None


def test_a_tree_is_what_it_was() -> None:
    tree = Tree(children=(Tree(name=4), Tree(name=None, leaf=Leaf(b""))))
    assert loads(Tree, dumps(Tree, tree)) == tree


def test_only_members_of_a_union_say_what_they_are() -> None:
    assert json.loads(dumps(Other, Other())) == {"kind": "a"}
    assert json.loads(dumps(Leaf | Other, Other())) == {"type": "Other", "kind": "a"}


@pytest.mark.parametrize("kind", [object, Leaf | int, dict[float, int], set[int]])
def test_what_has_no_json_form_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError):
        dumps(kind, None)
