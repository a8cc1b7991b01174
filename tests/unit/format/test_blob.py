"""The state blob: what was written once is read and written the same; what is odd is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from holdfast.errors import ManifestError
from holdfast.format import blob
from holdfast.format.blob import Live, SavedModule, SavedOptimizer, StateBlob, Static

STATIC = Static(
    objects={
        "model": SavedModule(),
        "opt": SavedOptimizer(
            True, [["model.w", "model.b"]], [[["step"], ["model.w"]], [[], ["model.b"]]]
        ),
        "lbfgs": SavedOptimizer(False, [["model.w"]], []),
    },
    aliases={"model.tied": "model.w"},
    world_size=2,
    buckets={"model": {"names": ["w"], "runs": [[0, 1]]}, "other": None},
)
LIVE = Live(
    tree={"model": {"$ref": "model"}, "n": 7},
    groups={"opt": [{"lr": 0.1}], "lbfgs": [{"lr": 1}]},
    loose={"lbfgs": {"model.w": {"n_iter": 3}}},
    objects={"sched": {"last_epoch": 2}},
    extra={"model.extra_state": 1},
    rng={"seed": 5},
    layouts={"x": [1, 0]},
)
TEXT = (
    b'{"static":{"objects":{"model":{"kind":"module"},"opt":{"kind":"optimizer","strict":true,'
    b'"params":[["model.w","model.b"]],"state":[[["step"],["model.w"]],[[],["model.b"]]]},'
    b'"lbfgs":{"kind":"optimizer","strict":false,"params":[["model.w"]],"state":[]}},'
    b'"aliases":{"model.tied":"model.w"},"world_size":2,'
    b'"buckets":{"model":{"names":["w"],"runs":[[0,1]]},"other":null}},'
    b'"live":{"tree":{"model":{"$ref":"model"},"n":7},"groups":{"opt":[{"lr":0.1}],'
    b'"lbfgs":[{"lr":1}]},"loose":{"lbfgs":{"model.w":{"n_iter":3}}},'
    b'"objects":{"sched":{"last_epoch":2}},"extra":{"model.extra_state":1},"rng":{"seed":5},'
    b'"layouts":{"x":[1,0]}}}'
)
"""As format 1 has it: written by the code before there were types."""


def test_a_text_is_written_as_it_always_was():
    assert TEXT == blob.join(STATIC.encode(), LIVE.encode())


def test_a_text_of_format_1_is_read_padded_or_not():
    assert StateBlob(static=STATIC, live=LIVE) == blob.decode(TEXT)
    assert StateBlob(static=STATIC, live=LIVE) == blob.decode(TEXT.ljust(len(TEXT) + 99))


def test_what_an_import_says_has_no_streams_and_no_layouts():
    """Older texts, too, have no layouts; what a reader does not know it leaves alone."""
    static = Static(objects={"m": SavedModule()}, aliases={}, world_size=1)
    live = Live(tree={"m": {"$ref": "m"}})
    text = blob.join(static.encode(), live.encode(), {"epoch": 3})

    assert text == (
        b'{"static":{"objects":{"m":{"kind":"module"}},"aliases":{},"world_size":1},'
        b'"live":{"tree":{"m":{"$ref":"m"}},"groups":{},"loose":{},"objects":{},"extra":{}},'
        b'"imported":{"epoch":3}}'
    )
    assert StateBlob(static=static, live=replace(live, layouts={})) == blob.decode(text)


def broken(path: str, value: object) -> bytes:
    raw = json.loads(TEXT)
    *above, last = path.split("/")
    table = raw
    for key in above:
        table = table[key]
    if value is None:
        del table[last]
    else:
        table[last] = value
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    ("path", "value", "rule"),
    [
        ("static", None, "static is not a JSON object"),
        ("live", [], "live is not a JSON object"),
        ("live/tree", None, "live.tree"),
        ("live/groups", 7, "live.groups"),
        ("live/groups/opt", None, "no groups of optimizer 'opt'"),
        ("live/groups/opt", [{}, {}], "no groups of optimizer 'opt'"),
        ("live/loose/lbfgs", None, "no state of optimizer 'lbfgs'"),
        ("live/layouts", {"x": [0.5]}, "layouts"),
        ("live/layouts", {"x": [True]}, "layouts"),
        ("live/layouts", {"x": 1}, "list of lists"),
        ("live/layouts", {"x": [0] * 65}, "more than 64 dims"),
        ("static/world_size", True, "world_size"),
        ("static/world_size", 0, "world_size"),
        ("static/aliases", {"a": 1}, "aliases is not of texts"),
        ("static/buckets", [], "static.buckets"),
        ("static/meshes", [0, 1], "list of lists"),
        ("static/meshes", [[0, True]], "meshes is not of numbers"),
        ("static/meshes", [[0, 1], []], "meshes has a group of nobody"),
        ("static/objects/model", {"kind": "spell"}, "'model' is of the unknown kind 'spell'"),
        ("static/objects/model", 1, "'model' is not a JSON object"),
        ("static/objects/opt/strict", 1, "strict"),
        ("static/objects/opt/params", [[1]], "params of object 'opt' is not of texts"),
        ("static/objects/opt/params", ["ab"], "list of lists"),
        ("static/objects/opt/state", [[["k"]]], "list of pairs"),
        ("static/objects/opt/state", [[["k"], [7]]], "not of texts"),
        ("static/objects/opt/state", [[["k"], ["model.gone"]]], "a parameter that it does not"),
    ],
    ids=str,
)
def test_a_text_that_breaks_a_rule_is_refused_by_name(path, value, rule):
    with pytest.raises(ManifestError, match=rule):
        blob.decode(broken(path, value))


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"static":{},"static":{}}', "'static' stands twice"),
        (b'{"static":NaN}', "NaN"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
    ],
    ids=str,
)
def test_what_is_no_text_is_refused(text, rule):
    with pytest.raises(ManifestError, match=rule):
        blob.decode(text)


def test_a_text_beyond_the_limit_is_not_parsed(monkeypatch):
    monkeypatch.setattr(blob, "BLOB_BYTES_MAX", len(TEXT) - 1)
    with pytest.raises(ManifestError, match="exceeds"):
        blob.decode(TEXT)


def test_more_entries_than_the_limit_are_refused(monkeypatch):
    monkeypatch.setattr(blob, "ENTRIES_MAX", 2)
    with pytest.raises(ManifestError, match="more than 2"):
        blob.decode(TEXT)
