"""Trees: everything that is written is read back, and hostile JSON is refused in one way (P9)."""

import contextlib
import json

from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ManifestError
from holdfast.format import tree

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.binary(max_size=5) | st.complex_numbers(allow_nan=False)
)  # fmt: skip
keys = st.recursive(
    scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)
trees = st.recursive(
    keys,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.sets(keys, max_size=3)
    ),
    max_leaves=10,
)


@given(trees)
def test_what_is_written_is_read_back(value):
    text = json.dumps(tree.encode(value, path="state", leaf=lambda *_: None), allow_nan=False)

    assert value == tree.decode(json.loads(text), leaf=lambda name: name)


markers = st.sampled_from(
    ["$ref", "$float", "$bytes", "$bytearray", "$complex", "$dict", "$tuple", "$set", "$frozenset",
     "$other", "a"]
)  # fmt: skip
hostile = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(markers, inner, max_size=2),
    max_leaves=8,
)


@given(hostile)
def test_any_json_is_read_or_refused_as_malformed(value):
    with contextlib.suppress(ManifestError):
        tree.decode(value, leaf=lambda name: name)
