"""Options of a command: its signature has their types and defaults, its docstring their help.

`train` has an option for each setting of `unison.config`, too, which the classes there describe.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from enum import StrEnum
from inspect import Parameter
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

Command = TypeVar("Command", bound=Callable[..., object])


def documented(
    *groups: type,
    panels: Mapping[str, str] | None = None,
    choices: Mapping[str, Sequence[str]] | None = None,
    **details: dict[str, Any],
) -> Callable[[Command], Command]:
    """Let typer make options of a function's parameters, with the help in its docstring's `Args:`.

    Parameters before `*` become arguments, those after it options. The docstring names all of them
    but the context.

    Args:
        groups: Dataclasses whose fields, as far as panels name them, are options besides.
        panels: The options that stand together in `--help`, in their order, by title.
        choices: All values of the options that have few.
        details: More of `typer.Option`, by parameter; `names` are those on the command line.
    """
    titles = {n: title for title, listed in (panels or {}).items() for n in listed.split()}
    order, rest = list(titles), Parameter.VAR_KEYWORD

    def decorate(function: Command) -> Command:
        text, own = inspect.getdoc(function) or "", inspect.signature(function, eval_str=True)
        helps: dict[str, str] = {}
        parameters: dict[str, Parameter] = {}
        for group in groups:
            helps |= described(inspect.getdoc(group) or "", "Attributes")
            hints = get_type_hints(group)
            for each in fields(group):
                default = None if each.default is MISSING else each.default
                parameters[each.name] = Parameter(
                    each.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[each.name]
                )
        helps |= described(text, "Args")
        parameters |= own.parameters
        made = []
        for name, parameter in parameters.items():
            if parameter.annotation is typer.Context:
                made.append(parameter)
            elif name in titles or (name in own.parameters and parameter.kind is not rest):
                more = {"help": helps[name], "rich_help_panel": titles.get(name)}
                more |= details.get(name, {})
                made.append(_for_typer(parameter, more, (choices or {}).get(name, ())))
        made.sort(key=lambda each: order.index(each.name) if each.name in titles else -1)
        function.__doc__ = text.partition("\nArgs:\n")[0]
        function.__signature__ = own.replace(parameters=made)  # type: ignore[attr-defined]
        return function

    return decorate


def described(docstring: str, section: str) -> dict[str, str]:
    """What a section of a docstring says of each name."""
    _, _, text = docstring.partition(f"{section}:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    return {name: " ".join(said.split()) for name, said in found}


def spelling(name: str) -> str:
    """An option as it is typed: that of `as_json` is `--json`."""
    return f"--{name.removeprefix('as_').replace('_', '-')}"


def _for_typer(parameter: Parameter, details: dict[str, Any], choices: Sequence[str]) -> Parameter:
    kind: Any = parameter.annotation
    default = parameter.default
    names = details.pop("names", (spelling(parameter.name),))
    if choices:  # an enum becomes a checked choice with completion
        kind = StrEnum(parameter.name, list(choices))
        default = kind(default)
    if parameter.kind is Parameter.KEYWORD_ONLY:
        said = typer.Option(*names, **details)
    else:
        said = typer.Argument(**details)
    return parameter.replace(default=default, annotation=Annotated[kind, said])


def plain_values(context: typer.Context) -> dict[str, Any]:
    """The arguments of a command, with words in the place of choices."""
    return {n: v.value if isinstance(v, StrEnum) else v for n, v in context.params.items()}


def was_given(context: typer.Context, name: str) -> bool:
    """Whether an option was given, rather than left at its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")
