"""The description of a service's REST as a page, made from its OpenAPI document. Pure.

One file without script: what others make of the same document asks a foreign host for theirs.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 24px auto; max-width: 1000px; }
main { padding: 0 14px; }
h2 { margin: 34px 0 4px; font-size: 17px; overflow-wrap: anywhere; }
h2 b { display: inline-block; min-width: 4.2em; }
p { margin: 4px 0; } table { border-collapse: collapse; margin: 8px 0; }
th, td { text-align: left; vertical-align: top; padding: 2px 18px 2px 0; }
@media (max-width: 700px) { td, th { display: block; padding: 0; } }
"""
_DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'sha256-{_DIGEST}'; base-uri 'none'; frame-ancestors 'none'"
)
"""The content policy of the page: its own style and nothing else."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}: REST</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{{ style }}</style></head>
<body><main><h1>{{ title }}: REST</h1>
<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>
{% for one in calls %}
<section><h2><b>{{ one.method }}</b> <code>{{ one.path }}</code></h2><p>{{ one.about }}</p>
{{ table(one.fields) }}
{% if one.takes %}<p>Takes {{ one.takes }}.</p>{% endif %}
{% if one.answers %}<p>Answers {{ one.answers }}.</p>{% endif %}</section>
{% endfor %}
{% for one in shapes %}
<section><h2 id="{{ one.path }}"><code>{{ one.path }}</code></h2><p>{{ one.about }}</p>
{{ table(one.fields) }}</section>
{% endfor %}
</main></body></html>
"""
_TABLE = """{% macro table(fields) %}{% if fields %}<table>
{% for name, kind, about in fields %}
<tr><th scope="row"><code>{{ name }}</code></th><td>{{ kind }}</td><td>{{ about }}</td></tr>
{% endfor %}
</table>{% endif %}{% endmacro %}"""

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A call, or the shape of a document: ``fields`` are name, kind and what it is about."""

    path: str
    about: str
    fields: tuple[tuple[str, str, str], ...]
    method: str = ""
    takes: str = ""
    answers: str = ""


def api_page(openapi: Document) -> str:
    """Return the page of an OpenAPI document."""
    shapes = openapi.get("components", {}).get("schemas", {})
    return _template().render(
        title=openapi["info"]["title"],
        style=STYLE,
        calls=list(_calls(openapi)),
        shapes=[_shape(name, shapes[name]) for name in sorted(shapes)],
    )


def _calls(openapi: Document) -> Iterable[Part]:
    for path, methods in openapi["paths"].items():
        for method, call in methods.items():
            body = _content(call.get("requestBody", {}))
            good = [one for code, one in call["responses"].items() if code.startswith("2")]
            yield Part(
                path=path,
                method=method.upper(),
                about=call.get("description", call.get("summary", "")),
                fields=tuple(map(_parameter, call.get("parameters", ()))),
                takes=_kind(body) if body else "",
                answers=_kind(_content(good[0])) if good else "",
            )


def _content(answer: Document) -> Document:
    """Return the schema of a body in its first media type; empty: there is none."""
    kinds: list[Document] = list(answer.get("content", {}).values())
    found: Document = kinds[0].get("schema", {}) if kinds else {}
    return found


def _parameter(one: Document) -> tuple[str, str, str]:
    schema = one.get("schema", {})
    needed = ", required" if one.get("required") else ""
    about = one.get("description", schema.get("description", ""))
    return one["name"], f"{one['in']}, {_kind(schema)}{needed}", about


def _shape(name: str, schema: Document) -> Part:
    fields = (
        (field, _kind(one), str(one.get("description", "")))
        for field, one in schema.get("properties", {}).items()
    )
    return Part(path=name, about=schema.get("description", ""), fields=tuple(fields))


def _kind(schema: Document) -> str:
    """Return what kind of value a schema is of, in words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    limits = [
        f"{sign} {schema[name]:g}"
        for name, sign in (("minimum", ">="), ("maximum", "<="), ("exclusiveMinimum", ">"))
        if name in schema
    ]
    return " ".join([str(schema.get("type", "any")), *limits])


@lru_cache(1)
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_TABLE + _PAGE)
