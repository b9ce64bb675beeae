"""What the demo model learns about the standard library: short answers made from the docstrings that ship
with CPython."""

import builtins
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from train_demo.docstring_prose import SCOPE, about, call_signature, first_sentence, prose

MODULE_WEIGHTS = {
    name: float(weight) for weight, names in SCOPE["module_weights"].items() for name in names.split()
}
MEMBERS_FROM_WEIGHT = 1.0  # of less asked modules only the module itself is taught
BUILTIN_WEIGHT, BUILTIN_METHOD_WEIGHT, METHOD_WEIGHT = 4.0, 3.0, 1.2
METHOD_WEIGHTS = {"bytes": 0.5}  # its methods repeat those of str
LISTED_MEMBERS = 10
IMPLEMENTED_IN = {"posix", "posixpath", "genericpath", "nt", "functools", "builtins", "_thread", "thread"}


@dataclass(frozen=True)
class Fact:
    """One topic: its names, its kind, its text, an example call, and how often to show it."""

    names: tuple[str, ...]
    kind: str  # "concept", "module", "class", "function", "method", "exception"
    answer: str
    usage: str | None = None
    members: str | None = None
    weight: float = 1.0


def stdlib_facts() -> list[Fact]:
    """Every fact about builtins, modules, their members and the methods of common classes; one per name."""
    facts: dict[str, Fact] = {}
    for fact in (*_builtin_facts(), *_module_facts(), *_method_facts()):
        facts.setdefault(fact.names[0], fact)
    return list(facts.values())


def _builtin_facts() -> Iterator[Fact]:
    for name, member in vars(builtins).items():
        if name.startswith("_") or not callable(member) or name in ("copyright", "credits", "license"):
            continue
        if inspect.isclass(member) and issubclass(member, BaseException):
            if text := prose(member):
                article = "an" if name[0].lower() in "aeio" else "a"
                yield Fact(
                    (name, f"{article} {name}"),
                    "exception",
                    about(name, text, f"{name} is a built-in exception"),
                )
            continue
        yield from _member_fact(name, f"the built-in {name}", member, _kind(member), BUILTIN_WEIGHT)


def _module_facts() -> Iterator[Fact]:
    for module_name, weight in MODULE_WEIGHTS.items():
        module = importlib.import_module(module_name)
        text = prose(module)
        if text is None:
            continue
        members = list(_public_members(module))
        answer = about(module_name, text, f"{module_name} is a module of the standard library")
        yield Fact(
            (module_name, f"the {module_name} module"),
            "module",
            answer,
            None,
            _listing(module_name, members, weight),
            weight * 1.5,
        )
        if weight < MEMBERS_FROM_WEIGHT:
            continue
        for name, member in members:
            full_name, kind = f"{module_name}.{name}", _kind(member)
            yield from _member_fact(full_name, f"the {full_name} {kind}", member, kind, weight)


def _method_facts() -> Iterator[Fact]:
    for path in SCOPE["classes_with_methods"]["names"].split():
        class_name, _, target = path.partition("=")
        weight = METHOD_WEIGHTS.get(class_name, METHOD_WEIGHT if "." in class_name else BUILTIN_METHOD_WEIGHT)
        for name, member in inspect.getmembers(_resolve(target or class_name)):
            if not name.startswith("_") and callable(member):
                yield from _member_fact(
                    f"{class_name}.{name}", f"the {name} method of {class_name}", member, "method", weight
                )


def _member_fact(full_name: str, long_name: str, member: Any, kind: str, weight: float) -> Iterator[Fact]:
    text = prose(member)
    if text is None:
        return
    answer = about(full_name, text, f"{full_name} is a {kind}")
    signature = call_signature(member, is_method=kind == "method")
    usage = (
        f"Call it as {full_name}{signature}. It{first_sentence(answer).removeprefix(full_name)}"
        if signature
        else None
    )
    yield Fact((full_name, long_name, f"{full_name}()"), kind, answer, usage, None, weight)


def _listing(module_name: str, members: list[tuple[str, Any]], weight: float) -> str | None:
    names = [name for name, _ in members if not name.isupper() and not name.startswith("_")][:LISTED_MEMBERS]
    if len(names) < 3 or weight < MEMBERS_FROM_WEIGHT:
        return None
    return f"The {module_name} module has, among others, {', '.join(names)}."


def _public_members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Functions and classes of the module's own (some are implemented in another one), without its
    exceptions."""
    root = module.__name__.split(".")[0]
    for name in getattr(module, "__all__", None) or [
        name for name in vars(module) if not name.startswith("_")
    ]:
        member = getattr(module, name, None)
        if (
            not callable(member)
            or inspect.ismodule(member)
            or (inspect.isclass(member) and issubclass(member, BaseException))
        ):
            continue
        owner = getattr(member, "__module__", None) or module.__name__
        if owner.lstrip("_").split(".")[0] in {root, *IMPLEMENTED_IN}:
            yield name, member


def _kind(member: Any) -> str:
    return "class" if inspect.isclass(member) else "function"


def _resolve(path: str) -> Any:
    module_name, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module_name or "builtins"), name)
