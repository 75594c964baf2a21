"""The record of one trial: threads, their segments, and every reply of the engine.

A request is reserved with `begin`, answered with `commit` or taken back with `rollback`; between the two its
segment is busy and a different request forks instead. Invariants I1-I4 hold for `rows()` by construction and
are checked by `invariants.check`. Nothing is dropped: a reply that is in no loss is an orphan with a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from legorl.engine.base import Sample
from legorl.harness.base import Speaker
from legorl.proxy.align import Node, Place, trace
from legorl.proxy.compose import Composed, compose
from legorl.proxy.echoes import Issued, MatchKey, Turn
from legorl.proxy.messages import ChatRequest, Message
from legorl.proxy.render import Renderer
from legorl.proxy.segment import Ids, Segment, digest
from legorl.proxy.transcript import Orphan, Thread, Transcript


@dataclass(eq=False)
class Plan:
    """A reserved request."""

    kind: str
    segment: Segment
    anchor: Node
    rest: Sequence[Message]
    keys: Sequence[MatchKey]
    ends: Sequence[int | None]
    """For each message of `rest` the token count of the conversation up to it, where it is known."""
    turns: Sequence[Turn | None]
    """For each message of `rest` the sampled turn that stands in its place."""
    base: int
    """Tokens of the segment before the request."""
    created: bool
    prompt_digest: str
    supersedes: Turn | None
    """An answer to the same conversation that was lost or thrown away."""

    @property
    def prompt_ids(self) -> Ids:
        """The whole prompt. int32 [P], valid while the plan is open."""
        return self.segment.tokens.view


def thread_name(speaker: Speaker) -> str:
    """`main`, or kind and key: two threads of one kind have different names."""
    return speaker.kind.value if speaker.key == "main" else f"{speaker.kind.value}:{speaker.key}"


class Ledger(Transcript):
    """See the module."""

    def __init__(self, trial: str, renderer: Renderer, *, observed: bool = False) -> None:
        """`observed`: a turn that the harness shows changed is context as it shows it, in a fork."""
        super().__init__(trial, str(renderer.model_dir or ""))
        self._renderer = renderer
        self._tools_index: dict[str, int] = {}
        self._issued = Issued(observed)
        self._tips: dict[int, Node] = {}
        """By segment id: the node at its end."""

    def prompt_tokens(self, request: ChatRequest, speaker: Speaker) -> int:
        """How many prompt tokens the request would have; changes nothing but the list of known threads."""
        plan = self.begin(request, speaker, dry=True)
        count = len(plan.segment)
        self.rollback(plan)
        return count

    def begin(self, request: ChatRequest, speaker: Speaker, *, dry: bool = False) -> Plan:
        """Reserve a place for the request's reply. `dry` leaves an earlier answer to the same request alone.

        Raises:
            Refusal: the model's chat template does not accept the messages.
        """
        root = self._root(self._thread(speaker), request)
        keys = [self._issued.key(message) for message in request.messages]
        path = trace(root, request.messages, keys, self._issued)
        self._issued.note_shown(request.messages[path[-1].depth :])
        place, composed = self._continue(path, request)
        again = path[-1].depth == len(keys)
        superseded = None
        if not dry:
            superseded = self._supersede(path[-1].node if again else place.node, again)
        kind, segment, created = self._segment_for(place.node, root.thread)
        base = len(segment)
        segment.busy = True
        segment.append_context(composed.ids)
        return Plan(
            kind="retry" if again and superseded else kind,
            segment=segment,
            anchor=place.node,
            rest=request.messages[place.depth :],
            keys=keys[place.depth :],
            ends=[None if end is None else base + end for end in composed.ends],
            turns=composed.turns,
            base=base,
            created=created,
            prompt_digest=segment.digest(),
            supersedes=superseded,
        )

    def commit(self, plan: Plan, turn_id: str, sample: Sample, message: Message) -> Turn:
        """Record the reply. `message` carries the tool-call ids that were issued."""
        segment = plan.segment
        segment.busy = False
        start = len(segment)
        segment.append_sample(sample)
        turn = Turn(
            id=turn_id,
            segment=segment,
            start=start,
            end=len(segment),
            finish=sample.finish,
            message=message,
            kind=plan.kind,
            ended=bool(len(sample.token_ids)) and int(sample.token_ids[-1]) == self._renderer.end_id,
            token_ids=sample.token_ids,
            prompt_digest=plan.prompt_digest,
            sample_digest=digest(sample.token_ids),
        )
        self.turns.append(turn)
        self._issued.add(turn)
        node = plan.anchor
        for shown, key, end, known in zip(plan.rest, plan.keys, plan.ends, plan.turns, strict=True):
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, shown)
            if child.end is None and end is not None:
                child.segment, child.end, child.turn = segment, end, known
            node = child
        tip = self._add(node, self._issued.key(message), message)
        tip.segment, tip.end, tip.turn = segment, turn.end, turn
        self._tips[segment.id] = tip
        return turn

    def rollback(self, plan: Plan) -> None:
        """Take a reservation back: no reply came."""
        plan.segment.busy = False
        if plan.supersedes is not None:
            plan.supersedes.superseded = False
        if plan.created:
            self.segments.remove(plan.segment)
        else:
            plan.segment.cut(plan.base)

    def finish(self) -> None:
        """No more requests: answers that never reached the harness, or were thrown away, become orphans."""
        for turn in self.turns:
            if not turn.orphan and not turn.echoed and (turn.superseded or not turn.delivered):
                self._orphan(turn, "replaced" if turn.delivered else "never delivered")

    def _thread(self, speaker: Speaker) -> Thread:
        name = thread_name(speaker)
        if name not in self.threads:
            self.threads[name] = Thread(name, speaker.kind, speaker.parent, speaker.label)
        return self.threads[name]

    def _root(self, thread: Thread, request: ChatRequest) -> Node:
        index = self._tools_index.setdefault(request.tools_key, len(self.tools))
        if index == len(self.tools):
            self.tools.append(request.tools)
        if index not in thread.roots:
            root = Node(len(self.nodes), None, None, tools=index, thread=thread.name)
            self.nodes.append(root)
            thread.roots[index] = root
        return thread.roots[index]

    def _add(self, parent: Node, key: MatchKey, message: Message) -> Node:
        node = Node(len(self.nodes), parent, message)
        self.nodes.append(node)
        parent.children[key] = node
        return node

    def _segment_for(self, anchor: Node, thread: str) -> tuple[str, Segment, bool]:
        source = anchor.segment
        if source is not None and self._tips.get(source.id) is anchor and not source.busy:
            return "extend", source, False
        segment = Segment(self._next_segment_id(), thread, self.threads[thread].parent)
        self.segments.append(segment)
        if source is None:
            return "open", segment, True
        assert anchor.end is not None
        segment.take_context(source, anchor.end)
        return "fork", segment, True

    def _next_segment_id(self) -> int:
        return self.segments[-1].id + 1 if self.segments else 0

    def _continue(self, path: Sequence[Place], request: ChatRequest) -> tuple[Place, Composed]:
        """The longest known conversation whose tokens can be continued, and what to append."""
        for place in reversed(path):
            node = place.node
            if node.parent is None or node.end is not None:
                prior = None if node.parent is None else node.prior
                rest = request.messages[place.depth :]
                composed = compose(self._renderer, prior, rest, request.tools, self._issued.author)
                if composed is not None:
                    return place, composed
        raise AssertionError("an opening can always be rendered")

    def _supersede(self, node: Node, again: bool) -> Turn | None:
        """The conversation's answer that nothing has followed, if there is one: thrown away, when the same
        request comes `again`; or lost on its way, whatever comes now.

        Both answers are kept until it is known which of them the harness goes on with. The new one takes the
        old one's place in its segment; the old one gets a segment of its own.
        """
        for child in node.children.values():
            turn = child.turn
            if turn is None or turn.superseded or turn.segment.busy or child.children:
                continue
            if not again and (turn.delivered or turn.echoed):
                continue
            if child.segment is turn.segment and self._tips.get(turn.segment.id) is child:
                turn.superseded = True
                if node.segment is turn.segment and node.end is not None:
                    self._set_aside(child, turn, node.end)
                    self._tips[node.segment.id] = node
                return turn
        return None

    def _set_aside(self, tip: Node, turn: Turn, end: int) -> None:
        aside = Segment(self._next_segment_id(), turn.segment.thread, turn.segment.parent_thread)
        self.segments.append(aside)
        aside.take_turn(turn.segment, turn.start)
        turn.segment.cut(end)
        tip.segment = turn.segment = aside
        self._tips[aside.id] = tip

    def _orphan(self, turn: Turn, reason: str) -> None:
        """Take a reply at the end of its segment out of it."""
        segment, span = turn.segment, slice(turn.start, turn.end)
        turn.orphan = reason
        self.orphans.append(
            Orphan(turn, segment.logprobs.view[span].copy(), segment.versions.view[span].copy())
        )
        segment.cut(turn.start)
        if turn.superseded and not segment.mask.view.any():
            segment.cut(0)  # a copy of what another segment has
        tip = self._tips.pop(segment.id)
        tip.segment, tip.end = None, None
