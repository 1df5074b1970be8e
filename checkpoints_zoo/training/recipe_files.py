"""Recipes from a user's Python file, and variants of recipes from text such as `lr=0.05` or `arguments.classes=10`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoints_zoo.errors import UsageError
from checkpoints_zoo.formats.text import nearest_name
from checkpoints_zoo.training.recipe import MAPPING_FIELDS, UNHASHED_FIELDS, Recipe, run_module, user_code_errors

_FILE_CONTENTS = "RECIPE, a Recipe or a function that returns one; or RECIPES, a dict of these by name"
_TYPE_DESCRIPTIONS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "int | None": "a whole number or none",
    "tuple[int, ...]": "whole numbers between commas, or none",
}
_FIXED_FIELDS = ("made_from", "split_rule")


def is_recipe_file(recipe_option: str) -> bool:
    """Return whether a recipe on the command line is a file: FILE.py, or FILE.py:NAME."""
    return recipe_option.endswith(".py") or ".py:" in recipe_option


def read_recipe(path_and_name: str) -> Recipe:
    """Run a user's file, and return the recipe that it defines.

    The file is code that is executed, so the user must trust it. The file defines `RECIPE` or `RECIPES`; with several
    recipes the name after the colon selects one. A recipe is a `Recipe`, or a function without arguments that returns a
    `Recipe`. The recipe's `build` may be a function of the file.

    Args:
        path_and_name: path of the file, and ":NAME" if the file has several recipes.

    Raises:
        UsageError: the file does not exist, or has no recipe of that name.
    """
    path, _, name = path_and_name.rpartition(":") if not path_and_name.endswith(".py") else (path_and_name, "", "")
    recipes = read_recipes(Path(path))
    if not name and len(recipes) == 1:
        return next(iter(recipes.values()))
    if name not in recipes:
        raise UsageError(
            f"recipe file {path}",
            expected=f"{path}:NAME, with one of the names {', '.join(recipes)}",
            found=repr(name) if name else "no name",
        )
    return recipes[name]


def read_recipes(path: Path) -> dict[str, Recipe]:
    """Run a user's file, and return all its recipes by name.

    Raises:
        UsageError: the file does not exist, or has no recipe.
    """
    if not path.is_file():
        raise UsageError(f"recipe file {path}", expected="a Python file", found="no such file")
    module_name = f"recipe_file_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    with user_code_errors(f"recipe file {path}", "Python that runs"):
        module = run_module(path.resolve(), module_name)
    recipes_by_name: Any = getattr(module, "RECIPES", None)
    if recipes_by_name is None and hasattr(module, "RECIPE"):
        recipes_by_name = {"": module.RECIPE}
    if not isinstance(recipes_by_name, Mapping) or not recipes_by_name:
        raise UsageError(
            f"recipe file {path}",
            expected=_FILE_CONTENTS,
            found=repr(recipes_by_name)[:80] if recipes_by_name else "neither",
        )
    with user_code_errors(f"recipe file {path}", "recipes"):
        recipes = [value() if callable(value) else value for value in recipes_by_name.values()]
    for recipe in recipes:
        if not isinstance(recipe, Recipe):
            raise UsageError(f"recipe file {path}", expected=_FILE_CONTENTS, found=repr(recipe)[:80])
    return {name or recipe.name: recipe for name, recipe in zip(recipes_by_name, recipes, strict=True)}


def vary_recipe(recipe: Recipe, changes: Sequence[str]) -> Recipe:
    """Set fields of a recipe; return the variant, whose `made_from` lists the fields that were set.

    Args:
        recipe: recipe whose fields are set.
        changes: texts "FIELD=VALUE"; or "arguments.NAME=VALUE" or "varied.FIELD=[VALUES]" with a JSON value.

    Raises:
        UsageError: a field is unknown (the error names the nearest), or a value has another type or is out of range,
            or the recipe varies the field.

    >>> from checkpoints_zoo.training.recipes import convnet_digits
    >>> variant = vary_recipe(convnet_digits(), ["lr=0.1", "epochs=5"])
    >>> variant.lr, variant.epochs, variant.made_from
    (0.1, 5, 'convnet-digits epochs=5 lr=0.1')
    """
    values: dict[str, Any] = {}
    for change in changes:
        field, value = _parse_change(change)
        mapping_field, dot, key = field.partition(".")
        if dot:
            values[mapping_field] = {**values.get(mapping_field, getattr(recipe, mapping_field)), key: value}
        elif field in recipe.varied:
            raise UsageError(
                f"field {field!r} of recipe {recipe.name!r}",
                expected="a field with one value for all members",
                found=f"one that `varied` sets to {', '.join(map(str, recipe.varied[field]))}",
                do=f"Set varied.{field}=[VALUE]",
            )
        else:
            values[field] = value
    variant = dataclasses.replace(recipe, **values)
    return dataclasses.replace(variant, made_from=_describe_variant(recipe, variant))


def check_changes(recipe: Recipe, changes: Sequence[str]) -> None:
    """Check that each change of the command line changes the recipe, and that no field is set twice.

    Raises:
        UsageError: a field has this value already, or is set twice, or `vary_recipe` raises this error.

    >>> from checkpoints_zoo.training.recipes import convnet_digits
    >>> check_changes(convnet_digits(), ["lr=0.05"])
    Traceback (most recent call last):
        ...
    checkpoints_zoo.errors.UsageError: --set lr=0.05: expected another value than the recipe's; found the value that \
recipe 'convnet-digits' has. Leave it out.
    """
    seen_fields = set[str]()
    for change in changes:
        field, value = _parse_change(change)
        if field in seen_fields:
            raise UsageError(f"--set {change}", expected="each field once", found=f"{field} twice")
        seen_fields.add(field)
        mapping_field, dot, key = field.partition(".")
        current_value = getattr(recipe, mapping_field).get(key) if dot else getattr(recipe, field)
        if type(value) is type(current_value) and value == current_value:
            raise UsageError(
                f"--set {change}",
                expected="another value than the recipe's",
                found=f"the value that recipe {recipe.name!r} has",
                do="Leave it out",
            )


def _parse_change(change: str) -> tuple[str, Any]:
    """Return the field and the value of a text FIELD=VALUE."""
    field, equals, text = change.partition("=")
    if not equals:
        raise UsageError(f"change {change!r}", expected="FIELD=VALUE, as in lr=0.05", found="no '='")
    mapping_field, dot, _ = field.partition(".")
    return field, _parse_json(field, text) if dot and mapping_field in MAPPING_FIELDS else _parse_field(field, text)


def _parse_field(field: str, value_text: str) -> Any:
    """Parse the text of a field by the field's type; return the value."""
    type_of_field = {
        f.name: str(f.type)
        for f in dataclasses.fields(Recipe)
        if f.type in _TYPE_DESCRIPTIONS and f.name not in _FIXED_FIELDS
    }
    if field not in type_of_field:
        known_fields = [*type_of_field, "arguments.NAME", "varied.FIELD"]
        # Other common names of fields: "learning_rate" means lr, and "wd" means weight_decay.
        suggestions = [
            name for name in known_fields if _initials_of_words(field) == name or _initials_of_words(name) == field
        ]
        suggestions.append(nearest_name(field, known_fields))
        raise UsageError(
            f"field {field!r} of a recipe",
            expected=f"one of {', '.join(known_fields)}",
            found="no such field",
            do=f"Did you mean {suggestions[0]}?",
        )
    field_type = type_of_field[field]
    try:
        if field_type == "str":
            return value_text
        if field_type == "bool":
            return {"true": True, "false": False}[value_text.lower()]
        if field_type == "tuple[int, ...]":
            return () if value_text == "none" else tuple(int(part) for part in value_text.split(","))
        if field_type == "int | None" and value_text == "none":
            return None
        return float(value_text) if field_type == "float" else int(value_text)
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"field {field!r} of a recipe", expected=_TYPE_DESCRIPTIONS[field_type], found=repr(value_text)
        ) from error


def _initials_of_words(field: str) -> str:
    return "".join(part[:1] for part in field.split("_"))


def _parse_json(field: str, json_text: str) -> Any:
    try:
        value = json.loads(json_text)
    except ValueError as error:
        raise UsageError(f"field {field!r} of a recipe", expected="a JSON value", found=repr(json_text)) from error
    return tuple(value) if isinstance(value, list) else value


def _describe_variant(base: Recipe, variant: Recipe) -> str:
    """Describe how a variant differs from its original recipe; return "NAME FIELD=VALUE …", sorted by field."""
    base_name, *earlier_settings = (base.made_from or base.name).split(" ")
    settings = dict(part.split("=", 1) for part in earlier_settings)
    for field in dataclasses.fields(Recipe):
        base_value, variant_value = getattr(base, field.name), getattr(variant, field.name)
        if field.name in UNHASHED_FIELDS or base_value == variant_value:
            continue
        if field.name in MAPPING_FIELDS:
            settings |= {
                f"{field.name}.{n}": _argument_text(v)
                for n, v in variant_value.items()
                if n not in base_value or base_value[n] != v
            }
        else:
            settings[field.name] = _field_text(variant_value)
    return " ".join([base_name, *(f"{name}={value}" for name, value in sorted(settings.items()))])


def _field_text(field_value: object) -> str:
    if isinstance(field_value, tuple):
        return ",".join(map(str, field_value)) or "none"
    if field_value is None:
        return "none"
    return str(field_value).lower() if isinstance(field_value, bool) else str(field_value)


def _argument_text(argument: object) -> str:
    """Return an argument as JSON without spaces: `made_from` is split at spaces."""
    return json.dumps(argument, separators=(",", ":")).replace(" ", "\\u0020")
