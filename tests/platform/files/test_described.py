"""Descriptions of fields in JSON schemas, from the docstrings below the fields."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, TypeAdapter

from share_compute.files.described import DescribedModel, describe


class Base(DescribedModel):
    first: int = 1
    """The first one.

    With more to say.
    """
    second: int = 2
    """The second one."""
    third: int = Field(default=3, description="Given by hand.")
    """Not used."""
    bare: int = 4


class Derived(Base):
    second: int = 5
    other_name: Base | None = Field(default=None, alias="other-name")
    """Another model."""

    class Inner(DescribedModel):
        """A class in a class."""

        value: int
        """Its value."""


@dataclass
class Plain:
    number: int
    """A number."""


def test_the_docstring_below_a_field_describes_it() -> None:
    properties = Base.model_json_schema()["properties"]
    assert properties["first"]["description"] == "The first one.\n\nWith more to say."
    assert properties["second"]["description"] == "The second one."
    assert properties["third"]["description"] == "Given by hand."
    assert "description" not in properties["bare"]


def test_descriptions_are_inherited_unless_the_field_is_declared_again() -> None:
    schema = Derived.model_json_schema()
    properties = schema["properties"]
    assert properties["first"]["description"].startswith("The first one.")
    assert "description" not in properties["second"]
    assert properties["other-name"]["description"] == "Another model."
    assert schema["$defs"]["Base"]["properties"]["second"]["description"] == "The second one."
    assert Derived.Inner.model_json_schema()["properties"]["value"]["description"] == "Its value."


def test_classes_in_functions_and_dataclasses_are_described() -> None:
    class Local(DescribedModel):
        value: int
        """Its value."""

    assert Local.model_json_schema()["properties"]["value"]["description"] == "Its value."
    schema = TypeAdapter(Plain).json_schema()
    describe(schema, Plain)
    assert schema["properties"]["number"]["description"] == "A number."


def test_code_without_a_file_has_no_descriptions() -> None:
    names: dict[str, type[DescribedModel]] = {}
    exec(
        'class Made(DescribedModel):\n    value: int\n    """Its value."""\n',
        {"DescribedModel": DescribedModel, "__name__": "made"},
        names,
    )
    assert "description" not in names["Made"].model_json_schema()["properties"]["value"]
