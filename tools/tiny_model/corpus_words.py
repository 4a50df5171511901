"""A seeded writer that turns templates into sentences, and the words that several topics share."""

import random
import re
from collections.abc import Sequence
from string import Template
from typing import TypeVar

T = TypeVar("T")

Turn = tuple[str, str]  # (what the user says, what the model answers)

_ALTERNATIVES = re.compile(r"\{([^{}]*)\}")


def words(text: str) -> list[str]:
    """The words between spaces."""
    return text.split()


def paragraphs(text: str) -> list[list[str]]:
    """The lines of each paragraph; " // " inside a line becomes a line break."""
    blocks = text.strip().split("\n\n")
    return [[line.replace(" // ", "\n") for line in block.split("\n")] for block in blocks]


ANIMALS = words(
    "fox owl bear rabbit mouse cat dog frog duck goat horse cow sheep pig hen lion tiger wolf deer "
    "squirrel hedgehog turtle snail bee ant spider penguin whale dolphin elephant giraffe monkey "
    "parrot donkey otter beaver badger crow camel butterfly panda koala kangaroo octopus crab seal "
    "shark swan eagle bat lizard chicken puppy kitten dinosaur unicorn raccoon mole moose zebra"
)
PEOPLE = words(
    "boy girl farmer sailor teacher baker king queen prince princess gardener wizard "
    "painter doctor "
    "fisherman shepherd knight pirate astronaut nurse clown detective mermaid cook postman student "
    "scientist musician grandmother child"
)
THINGS = words(
    "robot dragon star cloud train boat teapot kite snowman tree lamp clock river "
    "mountain spaceship "
    "toy car balloon book bell violin ghost giant leaf stone candle ship chair "
    "pencil door bridge flower cake cup umbrella shoe computer house"
)

WOMEN = words(
    "Ruby Lily Anna Mia Nora Ella Rosa Clara Luna Ivy Maya Sara Tess Hazel Daisy "
    "Olive Zoe Emma Lena "
    "Willow Pearl Greta Alice Molly Poppy Fern June Stella Wren Juno"
)
MEN = words(
    "Max Tom Leo Finn Oscar Ben Sam Hugo Theo Felix Otto Milo Jack Noah Bruno Eli "
    "Toby Rex Paul Karl "
    "Oliver Henry Jasper Pip Rusty Arlo Gus Ned Ravi Omar"
)

_OPENINGS = [
    "Hi! ", "Hello, ", "Hey, ", "Please tell me: ", "Question: ", "I have a question. ",
    "Tell me, ", "Quick question: ", "OK, ", "Hmm, ", "Can you tell me: ", "Now, ", "Please, ",
    "So, ",
]  # fmt: skip
_CLOSINGS = [
    " Thanks!", " Please.", " Thank you.", " I am curious.", " Be brief.", " Answer briefly.",
]  # fmt: skip
_SYLLABLES = words(
    "ar bel cor dan el fen gor hal in jar kel lor mon nar ol pel quen ros sten tur ul van wes xan "
    "yor zel bro cha dre stro ter ton vin sky berg field man son ia ova ard"
)


def with_article(noun: str) -> str:
    """ "owl" |-> "an owl"."""
    is_vowel = noun[0].lower() in "aeiou" and not noun.lower().startswith(("uni", "one"))
    return f"{'an' if is_vowel else 'a'} {noun}"


def sentence_case(text: str) -> str:
    """`text` with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def and_list(items: Sequence[str]) -> str:
    """["a", "b", "c"] |-> "a, b, and c"."""
    if len(items) < 3:
        return " and ".join(items)
    return f"{', '.join(items[:-1])}, and {items[-1]}"


class Writer:
    """Draws text from templates; the same seed writes the same text."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.rng.random() * len(items))]

    def sample(self, items: Sequence[T], count: int) -> list[T]:
        """`count` different items, in random order."""
        rest = list(items)
        return [rest.pop(int(self.rng.random() * len(rest))) for _ in range(count)]

    def invented_word(self) -> str:
        """A word that means nothing, in lower case."""
        return "".join(self.sample(_SYLLABLES, self.pick([2, 2, 3])))

    def say(self, template: str, **slots: object) -> str:
        """One expansion: `{a|b|}` is one of its alternatives (they nest), `$name` a slot."""
        while "{" in template:
            template = _ALTERNATIVES.sub(lambda m: self.pick(m.group(1).split("|")), template)
        text = Template(template).substitute({k: str(v) for k, v in slots.items()})
        return re.sub(r"  +", " ", text).strip(" ")

    def ask(self, template: str, *, keeps_case: bool = False, **slots: object) -> str:
        """`say`, with the habits of people who type: lower case, no question mark, a please."""
        text = sentence_case(self.say(template, **slots))
        if self.chance(0.1):
            text = self.pick(_OPENINGS) + text
        if self.chance(0.06):
            text += self.pick(_CLOSINGS)
        if self.chance(0.12):
            text = text.rstrip("?.!")
        if self.chance(0.12) and not keeps_case:
            text = text.lower()
        return text

    def answer(self, *templates: str, **slots: object) -> str:
        """The expansions of all templates as sentences of one paragraph."""
        parts = (self.say(template, **slots) for template in templates)
        return " ".join(sentence_case(part) for part in parts if part)
