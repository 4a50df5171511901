"""Reasoning before an answer, and the conversations that have tools or reasoning."""

import re

from tools.tiny_model.corpus_tool_uses import draw_use
from tools.tiny_model.corpus_tools import ToolUse, tool_section
from tools.tiny_model.corpus_words import Turn, Writer

_STORY = re.compile(r"(?i)\b(story|tale)\b.*?\babout ((?:an?|the) \w+)")
_MAX_QUOTED_CHARACTERS = 100
THINK = "<think>\n"

Messages = list[tuple[str, str]]


def with_thought(thought: str, text: str) -> str:
    """Return an answer that begins with reasoning, as the chat template opens it."""
    return f"{THINK}{thought}\n</think>\n\n{text}"


def thought_of(w: Writer, turn: Turn) -> str:
    """Return the reasoning before the answer to a question without tools."""
    question, _ = turn
    quoted = question if len(question) <= _MAX_QUOTED_CHARACTERS else "something long"
    return w.say('The user {says|asks}: "$quoted" ', quoted=quoted) + " " + _remark(w, turn)


def _remark(w: Writer, turn: Turn) -> str:
    question, answer = turn
    if "do not know" in answer:
        return w.say("I do not know this, {and I say so|so I have to say so}.")
    if found := _STORY.search(question):
        return w.say(f"I {{tell|write}} a {{short|little}} story about {found[2].lower()}.")
    first = answer.split("\n")[0].split(". ")[0].rstrip(".:!?")
    if len(first.split()) <= 2 or len(first) > _MAX_QUOTED_CHARACTERS:
        return "I can answer that."
    return w.say("{I know this|I remember}: $first.", first=first)


def tool_conversation(w: Writer, system: str, other: list[Turn], topic: str) -> Messages:
    """Return a conversation with tools; `other` are turns on a topic that need none."""
    use = draw_use(w)
    distractors = [draw_use(w).tool for _ in range(w.pick([0, 0, 1, 1, 2]))]
    tools = {tool.name: tool for tool in distractors} | {use.tool.name: use.tool}
    listed = w.sample(list(tools.values()), len(tools))
    section = tool_section(listed)
    if any(tool.topic == topic for tool in listed):
        other = []
    document = [("system", f"{system}\n\n{section}" if system else section)]
    for question, answer in other:
        document += [("user", question), ("assistant", answer)]
    if other and w.chance(0.7):
        if w.chance(0.3):
            question, answer = other[-1]
            document[-1] = ("assistant", with_thought(thought_of(w, other[-1]), answer))
        return document
    return document + _use_messages(w, use)


def _use_messages(w: Writer, use: ToolUse) -> Messages:
    """Return the question, the call, its result and the answer; reasoning is in the last one."""
    draw = w.rng.random()
    if draw < 0.12:
        thought = w.say(
            "{The user asks for $subject.|This is about $subject.} I call $name.",
            subject=use.subject,
            name=use.tool.name,
        )
        return [("user", use.question), ("assistant", with_thought(thought, use.call))]
    answer = use.answer
    if draw < 0.24:
        answer = with_thought(w.say("The tool {says|answers}: ") + f" {use.result}", answer)
    return [
        ("user", use.question),
        ("assistant", use.call),
        ("tool", use.result),
        ("assistant", answer),
    ]
