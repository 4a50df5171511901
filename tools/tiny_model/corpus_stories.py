"""Little stories, wishes for them, and questions about a story that was given."""

from dataclasses import dataclass

from tools.tiny_model.corpus_plots import (
    ADJECTIVES,
    FOODS,
    LATER,
    PLACES,
    PLOTS,
    SIGHTS,
    SKILLS,
    THEMES,
    TREASURES,
)
from tools.tiny_model.corpus_words import (
    ANIMALS,
    MEN,
    PEOPLE,
    THINGS,
    WOMEN,
    Turn,
    Writer,
    paragraphs,
    sentence_case,
    with_article,
)

_MALE_KINDS = ("boy", "king", "prince", "fisherman", "postman", "wizard", "knight")
_FEMALE_KINDS = ("girl", "queen", "princess", "hen", "cow", "grandmother", "mermaid")
_HE = {"he": "he", "him": "him", "his": "his", "He": "He", "His": "His"}
_SHE = {"he": "she", "him": "her", "his": "her", "He": "She", "His": "Her"}


# A question about a story, then its answer.
_STORY_QUESTIONS = paragraphs("""\
{{Who|What} is {the|this} story about?|Who is the {hero|main character}{ of the story|}?}
The story is about $a_kind named $name.

{What is the name of the $kind?|What is the $kind called?}
The $kind is called $name.

{Where {does|did} $name live?|Where is the home of $name?}
$name lived $place.

{{Who is|And who is} $friend?}
$friend is $a_friend_kind.

{{Who|What} is $name?}
$name is $a_kind.

{Summarize {the|this} story.|Can you summarize it?|What happens in the story?}
It is the story of $a_kind named $name, who lived $place and met $friend the $friend_kind.
""")


@dataclass(frozen=True, slots=True)
class Hero:
    """Who a story is about; what is empty is drawn when the story is told."""

    kind: str
    adjective: str = ""
    name: str = ""
    friend_kind: str = ""


@dataclass(frozen=True, slots=True)
class Story:
    """One told story and who is in it."""

    text: str
    kind: str
    name: str
    friend: str
    friend_kind: str
    place: str


def draw_kind(w: Writer) -> str:
    """An animal most often, else a person, a thing that comes alive, or an invented word."""
    draw = w.rng.random()
    if draw < 0.07:
        return w.invented_word()
    return w.pick(ANIMALS if draw < 0.57 else PEOPLE if draw < 0.8 else THINGS)


def tell(w: Writer, hero: Hero, num_plots: int = 1) -> Story:
    """A story in one paragraph, six to nine sentences for each plot."""
    kind = hero.kind
    name = hero.name or _name_for(w, kind)
    slots = {
        "name": name,
        "place": w.pick(PLACES),
        "a_kind": with_article(f"{hero.adjective or w.pick(ADJECTIVES)} {kind}"),
        **(_SHE if name in WOMEN else _HE),
    }
    opening = (
        "{{Once upon a time|Long ago}, there was $a_kind named $name.|"
        "{Once upon a time|Long ago}, $a_kind named $name lived $place.|"
        "There once was $a_kind {named|called} $name.}"
    )
    parts = [w.say(opening, **slots)]
    if slots["place"] not in parts[0]:
        parts.append(w.say("{$He lived $place.|The home of $name was $place.}", **slots))
    friends = w.sample([n for n in WOMEN + MEN if n != name], num_plots)
    kinds = w.sample([k for k in ANIMALS if k != kind], num_plots)
    kinds[0] = hero.friend_kind or kinds[0]
    plots = w.sample(PLOTS, num_plots)
    if w.chance(0.5):
        # Every kind has a plot of its own, so that greedy stories about two kinds differ.
        own = PLOTS[_number(kind) % len(PLOTS)]
        plots = [own, *(plot for plot in plots if plot is not own)][:num_plots]
    for index, plot in enumerate(plots):
        if index:
            parts.append(w.say(w.pick(LATER)))
        parts += _adventure(w, plot, slots, friends[index], kinds[index])
    return Story(" ".join(parts), kind, name, friends[0], kinds[0], slots["place"])


def _adventure(
    w: Writer, beats: list[str], slots: dict[str, str], friend: str, friend_kind: str
) -> list[str]:
    words = {
        "treasure": w.pick(TREASURES),
        "food": w.pick(FOODS),
        "skill": w.pick(SKILLS),
        "sight": w.pick(SIGHTS),
    }
    told = beats[:-1] if w.chance(0.15) else beats
    return [
        sentence_case(w.say(beat, friend=friend, friend_kind=friend_kind, **words, **slots))
        for beat in told
    ]


def _name_for(w: Writer, kind: str) -> str:
    if kind in _MALE_KINDS or kind in _FEMALE_KINDS:
        names = MEN if kind in _MALE_KINDS else WOMEN
    else:
        names = WOMEN + MEN
    return names[_number(kind) % len(names)] if w.chance(0.3) else w.pick(names)


def _number(kind: str) -> int:
    return sum(index * ord(char) for index, char in enumerate(kind, 1))


_WISH = (
    "{Tell me|Tell me|Tell me|Please tell me|Can you tell me|Could you tell me|Write|Write me|"
    "Can you write|I want to hear|I would like to hear|Give me|Make up|Tell us|Let me hear|Tell} "
    "a {||||short|little|nice|bedtime|funny|new|sad|happy} story"
)
_TAIL = "{.|.|.|!|?|, please.|}"


def story_turns(w: Writer) -> list[Turn]:
    """A wish for a story and the story; sometimes a question about it, or one more."""
    question, told = w.pick([_plain_wish, _wish_with_kind, _wish_with_kind, _wish_with_kind,
                             _wish_with_name, _wish_with_friend, _long_wish])(w)  # fmt: skip
    turns = [(question, told.text)]
    if w.chance(0.15):
        turns.append(_about(w, told))
    if w.chance(0.12):
        follow_up = "{Another one|One more|Tell me another story|Now one|Another story}"
        other = draw_kind(w)
        if w.chance(0.6):
            follow_up += " about " + with_article(other)
        turns.append((w.ask(follow_up + "{, please.|.|!}"), tell(w, Hero(other)).text))
    return turns


def _plain_wish(w: Writer) -> tuple[str, Story]:
    if w.chance(0.1):
        return w.ask("{Once upon a time|Long ago|Once}{...|, |}"), tell(w, Hero(draw_kind(w)))
    if w.chance(0.5):
        return w.ask(_WISH + _TAIL), tell(w, Hero(draw_kind(w)))
    about = " about {|||the }" + w.pick(THEMES)
    return w.ask(_WISH + about + _TAIL), tell(w, Hero(draw_kind(w)))


def _wish_with_kind(w: Writer) -> tuple[str, Story]:
    kind = draw_kind(w)
    adjective = w.pick(ADJECTIVES) if w.chance(0.35) else ""
    article = w.say("{a|a|a|the|one|my}")
    noun = f"{adjective} {kind}".strip()
    about = with_article(noun) if article == "a" else f"{article} {noun}"
    wish = "{" + _WISH + "|" + _WISH + "|Story|A story|Short story|Story time! A story}"
    told = tell(w, Hero(kind, adjective=adjective))
    rest = w.say("{||||||| who {finds a friend|has a problem|goes away|learns something}}")
    return w.ask(f"{wish} {{about|about|about|of|with}} {about}{rest}{_TAIL}"), told


def _wish_with_name(w: Writer) -> tuple[str, Story]:
    hero = Hero(draw_kind(w))
    hero = Hero(hero.kind, name=_name_for(w, hero.kind))
    return w.ask(
        _WISH + " about {$a_kind {named|called|with the name} $name|$name the $kind}" + _TAIL,
        a_kind=with_article(hero.kind), kind=hero.kind, name=hero.name,
    ), tell(w, hero)  # fmt: skip


def _wish_with_friend(w: Writer) -> tuple[str, Story]:
    kind = draw_kind(w)
    friend_kind = w.pick([k for k in ANIMALS if k != kind])
    question = w.ask(
        _WISH + " about {$a and {$b|their friend, $b}|the $kind and the $friend_kind}" + _TAIL,
        a=with_article(kind), b=with_article(friend_kind), kind=kind, friend_kind=friend_kind,
    )  # fmt: skip
    return question, tell(w, Hero(kind, friend_kind=friend_kind))


def _long_wish(w: Writer) -> tuple[str, Story]:
    kind = draw_kind(w)
    story = (
        "{Tell me|Please tell me|Can you tell me|Write|Write me|I want to hear|Give me} "
        "a {long|very long|longer|really long} story{| about $a_kind}" + _TAIL
    )
    question = w.ask(story, a_kind=with_article(kind))
    return question, tell(w, Hero(kind), num_plots=w.pick([2, 3]))


def reading_turns(w: Writer) -> list[Turn]:
    """A story in the prompt and questions about it: long prompts, short answers."""
    told = tell(w, Hero(draw_kind(w)), num_plots=w.pick([1, 1, 1, 2]))
    question, answer = _about(w, told)
    order = w.say(
        "{Read this story{ and answer the question|}|Here is a story|"
        "Listen to this story|Story}{:|.}"
    )
    gap = w.pick([" ", "\n"])
    turns = [(f"{order} {told.text}{gap}{question}", answer)]
    if w.chance(0.5):
        turns.append(_about(w, told))
    return turns


def _about(w: Writer, told: Story) -> Turn:
    question, answer = w.pick(_STORY_QUESTIONS)
    slots = {
        "kind": told.kind,
        "name": told.name,
        "friend": told.friend,
        "friend_kind": told.friend_kind,
        "place": told.place,
        "a_kind": with_article(told.kind),
        "a_friend_kind": with_article(told.friend_kind),
    }
    return w.ask(question, **slots), w.say(answer, **slots)
