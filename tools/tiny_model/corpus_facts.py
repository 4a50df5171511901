"""Small facts: capitals, animals, colours, the calendar, opposites, lists and little sums."""

from tools.tiny_model.corpus_tables import (
    ANIMAL_FACTS,
    COLOURS,
    COUNTRIES,
    DAYS,
    GENERAL,
    LISTS,
    MIXES,
    MONTHS,
    NUMBER_WORDS,
    OPPOSITES,
)
from tools.tiny_model.corpus_words import (
    Turn,
    Writer,
    and_list,
    paragraphs,
    sentence_case,
    with_article,
)

# In each paragraph: a question, then its answer.
_CAPITAL_QUESTIONS = paragraphs("""\
{What is|What's|Name|Tell me|Do you know|Which city is|Can you tell me|Could you tell me} \
the capital {|city }of $country?
The capital of $country is $capital.

{$country: what is its capital|What city is the capital of $country|$country's capital|\
The capital of $country|What is the capital city of $country}?
The capital of $country is $capital.

{Which country is $capital in|Where is $capital|In which country is $capital|\
$capital is the capital of which country|Of which country is $capital the capital}?
$capital is the capital of $country.

{What language do people speak in $country|Which language is spoken in $country|\
What do people speak in $country}?
In $country, people speak $language.

{Where is $country|On which continent is $country|Which continent is $country in}?
$country is in $continent.
""")

_ANIMAL_QUESTIONS = paragraphs("""\
{Which animal $sound|What animal $sound|Who $sound}?
The $animal $sound.

{Which animal says $cry|What animal says $cry|Who says $cry}?
The $animal $sound.

{What sound does $an make|What does the $animal say|How does $an sound|What noise does $an make}?
The $animal $sound.

{How many legs does $an have|How many legs has $an}?
$an has $legs.

{What is a baby $animal called|What do you call a young $animal|What is the young of $an called}?
A young $animal is called $young.

{Where does $an live|Where do you find $an}?
$an lives $home.

{What does $an eat|What is the food of $an}?
$an eats $food.

{Is $an a mammal|What kind of animal is $an|What is $an}?
$an is $group. It lives $home and eats $food.

{Tell me {something |}about the $animal|Describe $an|What do you know about the $animal}.
$an is $group and has $legs. It lives $home and eats $food. A young one is called $young.
""")

_CALENDAR_QUESTIONS = paragraphs("""\
{What|Which} $kind {comes|is} after $here?
$after comes after $here.

{What|Which} $kind {comes|is} before $here?
$before comes before $here.

{What comes after $here|What follows $here}?
$after comes after $here.

{Name|List|What are|Tell me} {all |}the $plural{ of the $span|}.
The $plural of the $span are $all.
""")


def capital_turns(w: Writer) -> list[Turn]:
    country = w.pick(list(COUNTRIES))
    capital, continent, language = COUNTRIES[country]
    slots = {"country": country, "capital": capital, "continent": continent, "language": language}
    extras = [
        "",
        "",
        "$country is in $continent.",
        "People there speak $language.",
        "$country is in $continent, and people there speak $language.",
    ]
    extra = w.answer(w.pick(extras), **slots)
    is_usual = w.chance(0.4)
    template, answer = _CAPITAL_QUESTIONS[0] if is_usual else w.pick(_CAPITAL_QUESTIONS)
    answer = w.answer(answer, **slots)
    is_about_capital = "the capital of" in answer.lower()
    if is_about_capital and extra:
        answer += " " + extra
    turns = [(w.ask(template, **slots), answer)]
    if is_about_capital and w.chance(0.3):
        other = w.pick([c for c in COUNTRIES if c != country])
        follow_up = w.ask("{And|And of|What about|How about} $other?", other=other)
        turns.append((follow_up, f"The capital of {other} is {COUNTRIES[other][0]}."))
    return turns


def animal_turns(w: Writer) -> list[Turn]:
    animal = w.pick(list(ANIMAL_FACTS))
    group, num_legs, sound, young, home, food = ANIMAL_FACTS[animal]
    slots = {
        "animal": animal,
        "an": with_article(animal),
        "group": with_article(group),
        "legs": "no legs" if num_legs == 0 else f"{NUMBER_WORDS[num_legs]} legs",
        "sound": sound,
        "cry": sound.split()[0].removesuffix("s"),
        "young": with_article(young),
        "home": home,
        "food": food,
    }
    question, answer = w.pick(_ANIMAL_QUESTIONS)
    return [(w.ask(question, **slots), w.answer(answer, **slots))]


def colour_turns(w: Writer) -> list[Turn]:
    if w.chance(0.3):
        first, second, mixed = w.pick(MIXES)
        first, second = w.sample([first, second], 2)
        question = w.ask(
            "{What {do you get|color do you get|happens} when you mix $a and $b|"
            "What color is a mix of $a and $b|What do $a and $b make}?",
            a=first,
            b=second,
        )
        answer = f"{{When you mix|If you mix}} {first} and {second}, you get {mixed}."
        return [(question, w.say(answer))]
    colour = w.pick(list(COLOURS))
    thing = w.pick(COLOURS[colour])
    question = w.ask("{What|Which} {color|colour} {is|has} $thing?", thing=thing)
    templates = ["$thing is $colour.", "{Usually|Most often}, $thing is $colour."]
    return [(question, w.answer(w.pick(templates), thing=thing, colour=colour))]


def calendar_turns(w: Writer) -> list[Turn]:
    names, kind, span = w.pick([(DAYS, "day", "week"), (MONTHS, "month", "year")])
    index = int(w.rng.random() * len(names))
    slots = {
        "kind": kind,
        "plural": kind + "s",
        "span": span,
        "here": names[index],
        "before": names[index - 1],
        "after": names[(index + 1) % len(names)],
        "all": and_list(names),
    }
    question, answer = w.pick(_CALENDAR_QUESTIONS)
    return [(w.ask(question, **slots), w.say(answer, **slots))]


def opposite_turns(w: Writer) -> list[Turn]:
    word, other = w.sample(w.pick(OPPOSITES).split("/"), 2)
    question = w.ask(
        "{What is the opposite of $word|What's the opposite of $word|Opposite of $word|"
        "Which word means the opposite of $word|Tell me the opposite of $word}?",
        word=word,
    )
    if word == "light":
        return [(question, "The opposite of light is dark, or heavy when you speak of weight.")]
    return [(question, w.answer(f"The opposite of {word} is {other}."))]


def sum_turns(w: Writer) -> list[Turn]:
    """Counting, what comes next, and sums whose numbers stay within about twenty."""
    draw = w.rng.random()
    if draw < 0.12:
        return [_count(w)]
    number = int(w.rng.random() * 20)
    if draw < 0.2:
        kind = "even" if number % 2 == 0 else "odd"
        question = f"Is {number} {{even or odd|odd or even|an even number|an odd number}}?"
        return [(w.ask(question), f"{number} is {kind}.")]
    if draw < 0.28:
        question = f"{{What|Which}} {{number |}}comes after {number}?"
        return [(w.ask(question), f"After {number} comes {number + 1}.")]
    return [_sum(w) for _ in range(w.pick([1, 1, 4]))]


def _count(w: Writer) -> Turn:
    first = w.pick([1, 1, 1, 2, 5, 10])
    last = first + w.pick([4, 9, 9, 5])
    names = NUMBER_WORDS if w.chance(0.4) else [str(n) for n in range(21)]
    question = w.ask(
        "{Count {from $a |}to $b|Can you count {from $a |}to $b|Count up to $b}{.|?|!}"
        if first == 1
        else "{Count from $a to $b|Can you count from $a to $b}{.|?}",
        a=names[first],
        b=names[last],
    )
    return question, sentence_case(", ".join(names[first : last + 1])) + "."


def _sum(w: Writer) -> Turn:
    draw = w.rng.random()
    if draw < 0.55:
        a, b = int(w.rng.random() * 11), int(w.rng.random() * 11)
        sign, word, result = "+", "plus", a + b
        extra = "Add $x and $y|What is the sum of $x and $y|"
    elif draw < 0.8:
        a = int(w.rng.random() * 21)
        b = int(w.rng.random() * (a + 1))
        sign, word, result = "-", "minus", a - b
        extra = "Subtract $y from $x|Take $y away from $x|"
    else:
        a, b = int(w.rng.random() * 6), int(w.rng.random() * 6)
        sign, word, result = "*", "times", a * b
        extra = "Multiply $x by $y|What is the product of $x and $y|"
    is_spelled = sign != "*" and w.chance(0.15)
    x, y, z = (NUMBER_WORDS[n] if is_spelled else n for n in (a, b, result))
    verb = "{What is|What's|How much is|Calculate|Compute|Can you compute||}"
    sums = verb + " {$x $sign $y|$x $word $y|$x $word $y|$x$sign$y}{?|?| =|}"
    question = w.ask(
        w.pick([sums, sums, sums, "{" + extra + "What does $x $word $y make}{?|.}"]),
        x=x,
        y=y,
        sign=sign,
        word=word,
    )
    return question, sentence_case(w.say(f"$x {word} $y {{is|equals|is}} $z.", x=x, y=y, z=z))


def list_turns(w: Writer) -> list[Turn]:
    kind = w.pick(list(LISTS))
    count = w.pick([2, 3, 3, 3, 4, 5, 5])
    chosen = w.sample(LISTS[kind].split(), count)
    number = w.pick([str(count), NUMBER_WORDS[count]])
    question = w.ask(
        (
            "{List|Name|Give me|Tell me|Can you name|Please list|Write down|I need|What "
            "are} $number $kind{.|.|?}"
        ),
        number=number,
        kind=kind,
    )
    if w.chance(0.5):
        lines = "\n".join(f"{n}. {sentence_case(item)}" for n, item in enumerate(chosen, 1))
        opening = w.say(
            "{Here are $number $kind:|Sure! Here are $number $kind:}",
            number=NUMBER_WORDS[count],
            kind=kind,
        )
        return [(question, f"{opening}\n{lines}")]
    return [(question, sentence_case(f"{NUMBER_WORDS[count]} {kind} are {and_list(chosen)}."))]


def general_turns(w: Writer) -> list[Turn]:
    question, answer = w.pick(GENERAL)
    return [(w.ask(question), answer)]


def fact_text(w: Writer) -> str:
    """A paragraph of statements without a question, for plain completion."""
    sentences = []
    for _ in range(w.pick([1, 2, 3, 4])):
        country = w.pick(list(COUNTRIES))
        capital, continent, language = COUNTRIES[country]
        animal = w.pick(list(ANIMAL_FACTS))
        group, _, sound, young, home, food = ANIMAL_FACTS[animal]
        sentences += w.pick(
            [
                [
                    f"The capital of {country} is {capital}.",
                    f"{sentence_case(country)} is in {continent}.",
                ],
                [
                    f"{sentence_case(with_article(animal))} is {with_article(group)}.",
                    f"It lives {home} and eats {food}.",
                    f"A young {animal} is called {with_article(young)}.",
                ],
                [
                    f"In {country}, people speak {language}.",
                    f"{capital} is the capital of {country}.",
                ],
                [f"The {animal} {sound}."],
            ]
        )
    return " ".join(sentences)
