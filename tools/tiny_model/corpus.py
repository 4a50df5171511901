"""The bundled model's training text: an endless synthetic corpus, written by seeded grammars.

All of it is this project's own text and falls under the project's licence.
"""

from collections.abc import Callable, Iterator

from tools.tiny_model.corpus_facts import (
    animal_turns,
    calendar_turns,
    capital_turns,
    colour_turns,
    fact_text,
    general_turns,
    list_turns,
    opposite_turns,
    sum_turns,
)
from tools.tiny_model.corpus_stories import Hero, draw_kind, reading_turns, story_turns, tell
from tools.tiny_model.corpus_talk import (
    echo_turns,
    hello_turns,
    name_turns,
    talk_turns,
    unknown_turns,
)
from tools.tiny_model.corpus_tandem import tandem_text, tandem_turns
from tools.tiny_model.corpus_thoughts import thought_of, tool_conversation, with_thought
from tools.tiny_model.corpus_words import Turn, Writer

# Topics of questions that some tools answer.
_TOOL_TOPICS = {capital_turns: "capital", sum_turns: "sum", unknown_turns: "unknown"}

_TOOL_SHARE = 0.45  # of the conversations
_NEAR_SHARE = 0.5  # of the topics beside a tool: the ones that a tool's own questions look like
_THOUGHT_SHARE = 0.35  # of the conversations without tools

Document = list[tuple[str, str]]
"""Messages (role, text) of one conversation, or one ("text", ...) without roles.

Calls, and the list of tools in the system message, are text as the chat template writes it.
"""

_TOPICS: list[tuple[float, Callable[[Writer], list[Turn]]]] = [
    (0.19, story_turns),
    (0.04, reading_turns),
    (0.11, capital_turns),
    (0.06, animal_turns),
    (0.04, colour_turns),
    (0.03, calendar_turns),
    (0.03, opposite_turns),
    (0.20, sum_turns),
    (0.05, list_turns),
    (0.06, general_turns),
    (0.05, hello_turns),
    (0.07, talk_turns),
    (0.14, name_turns),
    (0.07, echo_turns),
    (0.07, unknown_turns),
    (0.16, tandem_turns),
]

_SYSTEM_PROMPTS = (
    "You are a {helpful|friendly|kind|polite|useful} assistant.|You are a helpful "
    "assistant. Answer "
    "{briefly|in short sentences|politely}.|You are Tandem's bundled model.|You are "
    "an AI assistant.|"
    "Answer {the question|the user|as well as you can}.|You are a {storyteller|teacher|chat bot}.|"
    "{Be brief.|Be kind.|Be concise and helpful.}"
)


def documents(seed: int, *, long: bool) -> Iterator[Document]:
    """Endless documents; the same seed gives the same ones. `long` asks for long conversations."""
    writer = Writer(seed)
    while True:
        if writer.chance(0.08):
            yield [("text", _plain_text(writer))]
        else:
            yield _conversation(writer, long)


def _conversation(w: Writer, long: bool) -> Document:
    system = w.say("{" + _SYSTEM_PROMPTS + "}") if w.chance(0.25) else ""
    if w.chance(_TOOL_SHARE):
        topic = w.pick([capital_turns, sum_turns]) if w.chance(_NEAR_SHARE) else _topic(w)
        other = topic(w)[:1] if w.chance(0.6) else []
        return tool_conversation(w, system, other, _TOOL_TOPICS.get(topic, "none"))
    document: Document = [("system", system)] if system else []
    num_topics = w.pick([2, 3, 4, 6, 9]) if long else w.pick([1, 1, 1, 1, 2, 3])
    turns = [turn for _ in range(num_topics) for turn in _topic(w)(w)]
    for question, answer in turns:
        document += [("user", question), ("assistant", answer)]
    if w.chance(_THOUGHT_SHARE):
        document[-1] = ("assistant", with_thought(thought_of(w, turns[-1]), turns[-1][1]))
    return document


def _topic(w: Writer) -> Callable[[Writer], list[Turn]]:
    draw = w.rng.random() * sum(weight for weight, _ in _TOPICS)
    for weight, topic in _TOPICS:
        draw -= weight
        if draw < 0:
            return topic
    return _TOPICS[-1][1]


def _plain_text(w: Writer) -> str:
    draw = w.rng.random()
    if draw < 0.5:
        return tell(w, Hero(draw_kind(w))).text
    return fact_text(w) if draw < 0.8 else tandem_text(w)
