"""REST described on a page of our own: all calls and fields, nothing from elsewhere."""

import base64
import hashlib
import re

from holdfast_services.kit.api_page import POLICY, api_page

EVIL = "<script>alert(1)</script>"
DOCUMENT = {
    "info": {"title": EVIL},
    "paths": {
        "/api/v1/things/{thing}": {
            "get": {
                "description": EVIL,
                "parameters": [
                    {
                        "name": "limit",
                        "in": "query",
                        "required": True,
                        "schema": {"type": "integer", "minimum": 1, "maximum": 1000},
                        "description": "At most so many",
                    }
                ],
                "responses": {
                    "200": {
                        "content": {
                            "application/json": {
                                "schema": {"type": "array", "items": {"$ref": "#/x/ThingDoc"}}
                            }
                        }
                    }
                },
            }
        }
    },
    "components": {
        "schemas": {
            "ThingDoc": {
                "description": "One thing.",
                "properties": {
                    "at": {"anyOf": [{"type": "number"}, {"type": "null"}], "description": "When"}
                },
            }
        }
    },
}


def test_calls_and_shapes_are_described_in_words():
    page = api_page(DOCUMENT)

    assert "/api/v1/things/{thing}" in page
    assert "query, integer &gt;= 1 &lt;= 1000, required" in page
    assert "Answers list of ThingDoc." in page
    assert "number or null" in page


def test_texts_are_escaped_and_the_style_is_the_one_that_is_allowed():
    page = api_page(DOCUMENT)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)[1]

    assert "<script" not in page
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in POLICY
