"""Who is speaking in a request: one pure function of (headers, body) per harness.

Invariants: a rule keeps nothing between requests, so a helper's request that arrives first cannot become the
main thread; it raises on no body that is a JSON object; two subagents that run at once get different keys,
by the harness's own header where it sends one and by their opening messages where it does not (qwen-code).
Header names are lower case. Rules were read off recorded traffic of the pinned versions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from legorl.harness.base import Speaker, ThreadKind

Headers = Mapping[str, str]
Body = Mapping[str, Any]
Rule = Callable[[Headers, Body], Speaker]

MAIN = Speaker(ThreadKind.MAIN)
_TITLE, _COMPACTION, _MEMORY, _OTHER = "title", "compaction", "memory", "other"
_CLAUDE_COMPACTION = ("CRITICAL: Respond with TEXT ONLY", "Your task is to create a detailed summary")
"""How the last text begins with which Claude Code asks for a summary; tools and system prompt are the main
thread's."""
_QWEN_COMPACTION = "You are the component that summarizes a conversation"
_QWEN_MEMORY = "You are now acting as the managed memory"
_QWEN_SUBAGENT = "You operate in non-interactive mode: do not ask the user questions"
"""qwen-code puts this at the end of every subagent's system prompt."""
_CODEX_COMPACTION = "context checkpoint compaction"
_CODEX_SIDES = {"compact": _COMPACTION, "memory": _MEMORY}
"""How codex's own names of helper requests begin."""
_OPENHANDS_TEXT_TOOLS = "<function="
"""In the system prompt where the tools are described in words instead of in the request."""
_HEAD = 80
"""Characters in which an instruction says what it wants."""
_LABELS = {
    "summar": _COMPACTION,
    "compact": _COMPACTION,
    "prompt for continuing": _COMPACTION,
    "title": _TITLE,
    "memor": _MEMORY,
}
"""Words in the instructions of a helper request, and what it is for; the first one counts."""


def claude_code(headers: Headers, body: Body) -> Speaker:
    """Subagents send a header (or a mark in the billing line); a summary is asked for in the last text."""
    owner = MAIN
    agent = headers.get("x-claude-code-agent-id") or ""
    if not agent and any("cc_is_subagent=true" in text for text in _texts(body.get("system"))[:1]):
        agent = _opening_key(body)
    if agent:
        parent = headers.get("x-claude-code-parent-agent-id")
        owner = _subagent(agent, f"subagent:{parent}" if parent else "main")
    if any(text.lstrip().startswith(_CLAUDE_COMPACTION) for text in _last_texts(body)):
        return _side(_COMPACTION, owner)
    return owner if body.get("tools") else _helper(body, owner)


def opencode(headers: Headers, body: Body) -> Speaker:
    """Subagents name their parent's session; helpers have no tools, and the session of whom they help."""
    owner = MAIN
    if headers.get("x-parent-session-id"):
        owner = _subagent(headers.get("x-session-id") or _opening_key(body))
    return owner if body.get("tools") else _helper(body, owner)


def openhands(headers: Headers, body: Body) -> Speaker:
    """A subagent has a session of its own under the main conversation's prompt cache key."""
    session, root = headers.get("x-litellm-session-id"), body.get("prompt_cache_key")
    owner = _subagent(session) if session and root and session != root else MAIN
    if body.get("tools") or _OPENHANDS_TEXT_TOOLS in _system(body):
        return owner
    return _helper(body, owner)


def codex(headers: Headers, body: Body) -> Speaker:
    """Threads have ids, subagents a parent's; a summary is asked for in the last text, without tools."""
    thread, parent = headers.get("thread-id") or "", headers.get("x-codex-parent-thread-id") or ""
    role = headers.get("x-openai-subagent") or ""
    request = _turn_metadata(headers).get("request_kind")
    owner = MAIN
    if parent:
        root = parent == headers.get("session-id")
        owner = _subagent(thread or _opening_key(body), "main" if root else f"subagent:{parent}")
    for name, label in _CODEX_SIDES.items():
        if role.startswith(name) or str(request).startswith(name):
            return _side(label, owner)
    if role and not parent:
        owner = _subagent(thread or _opening_key(body))
    if any(_CODEX_COMPACTION in text.lower() for text in _last_texts(body)):
        return _side(_COMPACTION, owner)
    return owner if body.get("tools") else _helper(body, owner)


def qwen_code(headers: Headers, body: Body) -> Speaker:
    """No header says anything: system prompts tell the kind, opening messages tell subagents apart."""
    system = _system(body)
    if system.startswith(_QWEN_MEMORY):
        return _side(_MEMORY, MAIN)
    owner = MAIN
    if _QWEN_SUBAGENT in system:
        owner = _subagent(_opening_key(body))
    if any(text.lstrip().startswith(_QWEN_COMPACTION) for text in (system, *_last_texts(body))):
        return _side(_COMPACTION, owner)
    return owner if body.get("tools") else _helper(body, owner)


def mini_swe_agent(headers: Headers, body: Body) -> Speaker:
    """There is one thread only; in text mode it has no tools."""
    return MAIN


def generic(headers: Headers, body: Body) -> Speaker:
    """A program that is not known: by content alone. Without tools it may be one that writes its commands as
    text, so only instructions that begin with a title, summary or memory make a side request of it."""
    system = _system(body)
    if not body.get("tools"):
        begun = [system[:_HEAD], *(text[:_HEAD] for text in _last_texts(body)[-1:])]
        label = _label("\n".join(begun))
        return MAIN if label == _OTHER else _side(label, MAIN)
    return _subagent(_opening_key(body)) if "subagent" in system[:_HEAD].lower() else MAIN


RULES: dict[str, Rule] = {
    "claude_code": claude_code,
    "codex": codex,
    "mini_swe_agent": mini_swe_agent,
    "opencode": opencode,
    "openhands": openhands,
    "qwen_code": qwen_code,
}
"""By the harness's name."""

_USER_AGENTS = (
    ("claude-cli/", "claude_code"),
    ("opencode/", "opencode"),
    ("QwenCode/", "qwen_code"),
    ("codex", "codex"),
)
_OWN_HEADERS = (
    ("x-claude-code-session-id", "claude_code"),
    ("x-session-affinity", "opencode"),
    ("x-litellm-session-id", "openhands"),
    ("x-codex-turn-metadata", "codex"),
)
_PROMPTS = (
    ("You are a helpful assistant that can interact with a computer", "mini_swe_agent"),
    ("You are a helpful assistant that can interact multiple times with a computer", "mini_swe_agent"),
    ("You are Qwen Code", "qwen_code"),
    ("You are opencode", "opencode"),
    ("You are Claude Code", "claude_code"),
    ("<SOUL>\nYou are OpenHands", "openhands"),
    ("You are a coding agent running in the Codex CLI", "codex"),
)


def detect(headers: Headers, body: Body) -> str | None:
    """The name of the harness that sent a request, None where nothing gives it away."""
    agent = headers.get("user-agent", "")
    for start, name in _USER_AGENTS:
        if agent.startswith(start):
            return name
    for header, name in _OWN_HEADERS:
        if headers.get(header):
            return name
    system = _system(body)
    return next((name for start, name in _PROMPTS if system.startswith(start)), None)


def _subagent(key: str, parent: str = "main") -> Speaker:
    return Speaker(ThreadKind.SUBAGENT, key=key, parent=parent)


def _side(label: str, owner: Speaker) -> Speaker:
    if owner.kind is ThreadKind.MAIN:
        return Speaker(ThreadKind.SIDE, key=label, parent="main", label=label)
    return Speaker(ThreadKind.SIDE, key=f"{label}:{owner.key}", parent=f"subagent:{owner.key}", label=label)


def _helper(body: Body, owner: Speaker) -> Speaker:
    """A request without tools, on behalf of `owner`."""
    instructions = _system(body)[:400] or "\n".join(text[:400] for text in _last_texts(body))
    return _side(_label(instructions), owner)


def _label(instructions: str) -> str:
    words = instructions.lower()
    found = {words.find(mark): label for mark, label in _LABELS.items() if mark in words}
    return found[min(found)] if found else _OTHER


def _turn_metadata(headers: Headers) -> Mapping[str, Any]:
    try:
        value = json.loads(headers.get("x-codex-turn-metadata", "{}"))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _messages(body: Body) -> Sequence[Any]:
    """Messages of either of OpenAI's wires or Anthropic's."""
    found = body.get("messages") or body.get("input")
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    return found if isinstance(found, list) else []


def _texts(content: Any) -> list[str]:
    """Texts of a message's content; results of tools are not among them."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return []
    texts = (block.get("text") for block in content if isinstance(block, dict))
    return [text for text in texts if isinstance(text, str)]


def _system(body: Body) -> str:
    """The system prompt, wherever the wire has it; what precedes the first message of another role."""
    texts = _texts(body.get("system")) + _texts(body.get("instructions"))
    for item in _messages(body):
        if not isinstance(item, dict) or item.get("role") not in ("system", "developer"):
            break
        texts += _texts(item.get("content"))
    return "\n".join(text for text in texts if not text.startswith("x-anthropic-billing-header"))


def _last_texts(body: Body) -> list[str]:
    """Texts of the last message that is not a system message put in behind it."""
    for item in reversed(_messages(body)):
        if isinstance(item, dict) and item.get("role") not in ("system", "developer"):
            return _texts(item.get("content"))
    return []


def _opening(body: Body) -> Iterator[str]:
    """Texts up to the first thing that the policy or a tool said."""
    yield _system(body)
    for item in _messages(body):
        if isinstance(item, dict) and item.get("role") in ("user", "system", "developer"):
            yield from _texts(item.get("content"))
        else:
            return


def _opening_key(body: Body) -> str:
    """A short name for a conversation, by how it begins."""
    hashed = hashlib.blake2b(digest_size=6)
    for text in islice(_opening(body), 64):
        hashed.update(text.encode(errors="replace") + b"\0")
    return hashed.hexdigest()
