"""Tools of the Responses protocol, as functions that a policy can be offered.

A policy knows functions only: a tool in a namespace gets a name that says so, a custom tool (free text) a
function with that text as its one argument, and calls are written back in the form their tool came in.
Tools that the provider would run are withheld, and the record says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from legorl.proxy.messages import Json, Tool, ToolUse
from legorl.proxy.wire import object_of, read_each, want_name, want_object, want_schema, want_text

_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True)
class ToolForm:
    """How calls of a tool are written that is no plain function."""

    name: str
    namespace: str
    custom: bool


@dataclass(frozen=True)
class Tools:
    """A request's tools."""

    offered: tuple[Tool, ...]
    forms: Mapping[str, ToolForm]
    """By the name of the tool as it is offered."""
    withheld: tuple[str, ...]
    """Types of those that are run by the provider."""


def full_name(namespace: str, name: str) -> str:
    """The name under which the policy knows a tool."""
    return f"{namespace}__{name}" if namespace else name


def read_tools(value: Json) -> Tools:
    """A request's `tools`. Raises `Refusal` naming the field."""
    offered: list[Tool] = []
    forms: dict[str, ToolForm] = {}
    withheld: list[str] = []
    for tools in read_each(value, "tools", _read):
        for tool, form in tools:
            if tool is None:
                withheld.append(form.name)
                continue
            offered.append(tool)
            if form.namespace or form.custom:
                forms[tool.name] = form
    return Tools(tuple(offered), forms, tuple(withheld))


def call_item(call: ToolUse, form: ToolForm | None, item_id: str) -> dict[str, Json]:
    """A call as an output item."""
    head: dict[str, Json] = {"call_id": call.id, "name": form.name if form else call.name}
    if form and form.namespace:
        head["namespace"] = form.namespace
    head["status"] = "completed"
    if form and form.custom:
        return {
            "id": f"ctc_{item_id}",
            "type": "custom_tool_call",
            **head,
            "input": _free_text(call.arguments),
        }
    return {"id": f"fc_{item_id}", "type": "function_call", **head, "arguments": call.arguments}


def _read_listed(value: Json) -> list[tuple[Tool | None, ToolForm]]:
    return _read(value, "", "")


def _read(value: Json, namespace: str = "", about: str = "") -> list[tuple[Tool | None, ToolForm]]:
    item = want_object(value, "tool")
    kind = want_name(item.get("type"), "type")
    if kind == "namespace" and not namespace:
        name = want_name(item.get("name"), "name")
        about = want_text(item.get("description"), "description")
        inner = read_each(item.get("tools"), "tools", lambda tool: _read(tool, name, about))
        return [pair for pairs in inner for pair in pairs]
    if kind not in ("function", "custom"):
        return [(None, ToolForm(kind, namespace, custom=False))]
    form = ToolForm(want_name(item.get("name"), "name"), namespace, custom=kind == "custom")
    texts = [about, want_text(item.get("description"), "description")]
    parameters: Mapping[str, Json] = _FREE_TEXT
    if form.custom:
        texts.append(_grammar(item.get("format")))
    else:
        parameters = want_schema(item.get("parameters"), "parameters")
    description = "\n".join(text for text in texts if text)
    return [(Tool(full_name(namespace, form.name), description, parameters), form)]


def _grammar(value: Json) -> str:
    """What a custom tool's input must look like, as the policy reads it."""
    given = want_object(value or {}, "format")
    definition = want_text(given.get("definition"), "format.definition")
    return f"Format of the input ({given.get('syntax')}):\n{definition}" if definition else ""


def _free_text(arguments: str) -> str:
    """A custom tool's input; arguments of any other shape are handed over as they are."""
    text = (object_of(arguments) or {}).get("input")
    return text if isinstance(text, str) else arguments
