"""Base class of pydantic models whose JSON schemas describe each field with the docstring below it.

``use_attribute_docstrings`` of pydantic reads the source when a class is made: 0.4 s of processor time at each start of
the server, and as much as half of the imports of its smaller processes. This class reads it when a schema is made.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema


class DescribedModel(BaseModel):
    """Pydantic model whose fields are described by the docstrings below them, unless the fields have descriptions."""

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        described = handler(schema)
        aliases = {name: field.alias for name, field in cls.model_fields.items() if field.alias is not None}
        describe(handler.resolve_ref_schema(described), cls, aliases)
        return described


def describe(schema: dict[str, Any], kind: type, aliases: Mapping[str, str] = MappingProxyType({})) -> None:
    """Add docstrings of the attributes of a class and its bases to properties that have no description.

    Args:
        schema: JSON schema of the class.
        kind: a dataclass, or a model of pydantic.
        aliases: property names by attribute name, where they differ.
    """
    docstrings: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        docstrings |= _docstrings_in(part.__module__).get(part.__qualname__, {})
    properties = schema.get("properties", {})
    for name, text in docstrings.items():
        for key in {name, aliases.get(name, name)} & properties.keys():
            if text:
                properties[key].setdefault("description", text)


@cache
def _docstrings_in(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of the attributes of all classes in a module, by qualified name of the class.

    An attribute without a docstring gets an empty one; it does not inherit that of a base class.
    """
    found: dict[str, dict[str, str]] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                name = f"{prefix}{node.name}"
                found[name] = dict(_attributes(node.body))
                visit(node.body, f"{name}.")
            elif isinstance(node, ast.FunctionDef):
                visit(node.body, f"{prefix}{node.name}.<locals>.")

    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # code of the interpreter, or code without a file
        return {}
    visit(ast.parse(source).body, "")
    return found


def _attributes(body: list[ast.stmt]) -> list[tuple[str, str]]:
    found = []
    for node, following in pairwise([*body, ast.Pass()]):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = ""
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                text = inspect.cleandoc(str(following.value.value))
            found.append((node.target.id, text))
    return found
