"""What the proxy's HTTP side promises, as an OpenAPI document for generated requests."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def obj(required: str = "", **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": required.split()}


def array(*items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": any_of(*items), "minItems": least, "maxItems": 4}


def any_of(*schemas: Schema) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def kind(*names: str) -> Schema:
    return {"type": "string", "enum": list(names)}


TEXT: Schema = {"type": "string", "maxLength": 40}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 10}
NULL: Schema = {"type": "null"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
ANY: Schema = {}
OBJECT: Schema = {"type": "object"}

_TEXT_BLOCK = obj("type text", type=kind("text"), text=TEXT, cache_control=OBJECT)
_IMAGE = obj("type", type=kind("image"), source=OBJECT)
_DOCUMENT = obj("type", type=kind("document"), source=obj("", type=kind("text", "url"), data=TEXT))
_RESULT_CONTENT = any_of(
    TEXT,
    array(_TEXT_BLOCK, _IMAGE, _DOCUMENT, obj("type tool_name", type=kind("tool_reference"), tool_name=TEXT)),
)
_ANTHROPIC = obj(
    "messages max_tokens",
    model=TEXT,
    max_tokens={"type": "integer"},
    stream=FLAG,
    temperature=NUMBER,
    tool_choice=OBJECT,
    thinking=OBJECT,
    system=any_of(TEXT, array(_TEXT_BLOCK)),
    tools=array(
        obj("name input_schema", name=NAME, description=TEXT, input_schema=OBJECT),
        obj("type name", type=kind("web_search_20250305"), name=NAME),
    ),
    messages=array(
        obj(
            "role content",
            role=kind("user"),
            content=any_of(
                TEXT,
                array(
                    _TEXT_BLOCK,
                    _IMAGE,
                    _DOCUMENT,
                    obj(
                        "type tool_use_id",
                        type=kind("tool_result"),
                        tool_use_id=NAME,
                        content=_RESULT_CONTENT,
                        is_error=FLAG,
                    ),
                ),
            ),
        ),
        obj(
            "role content",
            role=kind("assistant"),
            content=array(
                _TEXT_BLOCK,
                obj("type thinking", type=kind("thinking"), thinking=TEXT, signature=TEXT),
                obj("type data", type=kind("redacted_thinking"), data=TEXT),
                obj("type id name input", type=kind("tool_use"), id=NAME, name=NAME, input=OBJECT),
                obj("type id name", type=kind("server_tool_use"), id=NAME, name=NAME, input=OBJECT),
            ),
        ),
        obj("role content", role=kind("system"), content=TEXT),
        least=1,
    ),
)

_FUNCTION = obj("name", name=NAME, description=TEXT, parameters=OBJECT)
_CALLED = obj("name arguments", name=NAME, arguments=TEXT)
_PARTS = array(
    obj("type text", type=kind("text"), text=TEXT), obj("type", type=kind("image_url"), image_url=OBJECT)
)
_CHAT = obj(
    "messages",
    model=TEXT,
    stream=FLAG,
    stream_options=any_of(NULL, obj("", include_usage=FLAG)),
    n={"enum": [1, None]},
    temperature=NUMBER,
    stop=any_of(NULL, TEXT, array(TEXT)),
    tool_choice=any_of(TEXT, OBJECT),
    tools=array(obj("type function", type=kind("function"), function=_FUNCTION)),
    functions=array(_FUNCTION),
    messages=array(
        obj("role content", role=kind("system", "developer", "user"), content=any_of(TEXT, _PARTS)),
        obj(
            "role",
            role=kind("assistant"),
            content=any_of(NULL, TEXT, _PARTS),
            reasoning_content=any_of(NULL, TEXT),
            tool_calls=array(obj("id function", id=NAME, type=kind("function"), function=_CALLED)),
            function_call=any_of(NULL, _CALLED),
        ),
        obj("role tool_call_id content", role=kind("tool"), tool_call_id=NAME, content=any_of(TEXT, _PARTS)),
        obj("role name content", role=kind("function"), name=NAME, content=TEXT),
        least=1,
    ),
)

_INPUT_PARTS = array(
    obj("type text", type=kind("input_text", "output_text"), text=TEXT),
    obj("type", type=kind("input_image", "input_file"), image_url=TEXT),
)
_RESPONSES = obj(
    "input",
    model=TEXT,
    stream=FLAG,
    store=FLAG,
    background={"enum": [False]},
    instructions=any_of(NULL, TEXT),
    reasoning=OBJECT,
    tools=array(
        obj("type name", type=kind("function"), name=NAME, description=TEXT, parameters=OBJECT),
        obj("type name", type=kind("custom"), name=NAME, format=obj("", syntax=TEXT, definition=TEXT)),
        obj(
            "type name tools",
            type=kind("namespace"),
            name=NAME,
            tools=array(obj("type name", type=kind("function"), name=NAME)),
        ),
    ),
    input=any_of(
        NAME,
        array(
            obj("role content", role=kind("user", "developer", "system"), content=any_of(TEXT, _INPUT_PARTS)),
            obj("type role content", type=kind("message"), role=kind("assistant"), content=_INPUT_PARTS),
            obj(
                "type summary",
                type=kind("reasoning"),
                summary=array(obj("type text", type=kind("summary_text"), text=TEXT)),
                encrypted_content=TEXT,
            ),
            obj(
                "type call_id name arguments",
                type=kind("function_call"),
                call_id=NAME,
                name=NAME,
                namespace=any_of(NULL, NAME),
                arguments=TEXT,
            ),
            obj(
                "type call_id name input",
                type=kind("custom_tool_call"),
                call_id=NAME,
                name=NAME,
                input=TEXT,
            ),
            obj(
                "type call_id output",
                type=kind("function_call_output", "custom_tool_call_output"),
                call_id=NAME,
                output=any_of(TEXT, _INPUT_PARTS),
            ),
            least=1,
        ),
    ),
)

_WORD: Schema = {"type": "string", "minLength": 1}
_ANTHROPIC_ERROR = obj("type error", type=kind("error"), error=obj("type message", type=_WORD, message=_WORD))
_OPENAI_ERROR = obj(
    "error",
    error=obj("type message code param", type=_WORD, message=_WORD, code=any_of(NULL, _WORD), param=NULL),
)


def _operation(request: Schema | None, reply: Schema, error: Schema, *, stream: bool = False) -> Schema:
    documents = {"application/json": {"schema": reply}}
    if stream:
        documents |= {"text/event-stream": {"schema": obj("data", data={"type": "string"})}}
    refused = {"description": "Refused", "content": {"application/json": {"schema": error}}}
    operation: Schema = {
        "responses": {
            "200": {"description": "Answered", "content": documents},
            "400": refused,
            "405": refused,
        }
    }
    if request is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": request}}}
    return operation


OPENAPI: Schema = {
    "openapi": "3.1.0",
    "info": {"title": "proxy", "version": "1"},
    "paths": {
        "/v1/messages": {
            "post": _operation(
                _ANTHROPIC,
                obj("id content usage stop_reason", type=kind("message"), content={"type": "array"}),
                _ANTHROPIC_ERROR,
                stream=True,
            )
        },
        "/v1/messages/count_tokens": {
            "post": _operation(
                _ANTHROPIC, obj("input_tokens", input_tokens={"type": "integer"}), _ANTHROPIC_ERROR
            )
        },
        "/v1/chat/completions": {
            "post": _operation(
                _CHAT, obj("id choices usage", choices={"type": "array"}), _OPENAI_ERROR, stream=True
            )
        },
        "/v1/responses": {
            "post": _operation(
                _RESPONSES,
                obj("id output usage status", output={"type": "array"}),
                _OPENAI_ERROR,
                stream=True,
            )
        },
        "/v1/responses/input_tokens": {
            "post": _operation(
                _RESPONSES, obj("input_tokens", input_tokens={"type": "integer"}), _OPENAI_ERROR
            )
        },
        "/v1/models": {"get": _operation(None, obj("data", data={"type": "array"}), _OPENAI_ERROR)},
    },
}
