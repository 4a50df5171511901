"""Conversations with tools: questions that a tool answers, its call, its result, the answer."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from tools.tiny_model.corpus_tables import COUNTRIES
from tools.tiny_model.corpus_tools import Tool, ToolUse
from tools.tiny_model.corpus_words import MEN, THINGS, WOMEN, Writer, with_article

_SKIES = ["sunny", "cloudy", "rainy", "snowy", "windy", "foggy", "clear", "stormy"]
_OPERATIONS = {
    "add": ("plus", "+", lambda a, b: a + b),
    "subtract": ("minus", "-", lambda a, b: a - b),
    "multiply": ("times", "*", lambda a, b: a * b),
}
_ROOMS = ["kitchen", "garden", "hall", "bedroom", "bathroom", "cellar", "office", "garage"]


def draw_use(w: Writer) -> ToolUse:
    """Return a use of a tool of any kind."""
    return w.pick(_KINDS)(w)


def _tool(
    w: Writer, names: str, parameters: dict[str, str], description: str, topic: str = "unknown"
) -> Tool:
    """Return a tool with one of the names; those of its parameters may be alternatives too."""
    name = w.say("{" + names + "}")
    text = w.say(description) if w.chance(0.85) else ""
    drawn = {w.say("{" + key + "}"): kind for key, kind in parameters.items()}
    return Tool(name, drawn, text, topic)


def _use(
    tool: Tool, question: str, values: Sequence[Any], subject: str, result: str, answer: str
) -> ToolUse:
    """Return the use of a tool with `values` for its parameters, in their order."""
    arguments = dict(zip(tool.parameters, values, strict=True))
    return ToolUse(tool, question, arguments, subject, result, answer)


def _ask(w: Writer, template: str, **slots: object) -> str:
    """Return a question whose names keep their case, as arguments have it."""
    return w.ask(template, keeps_case=True, **slots)


def _place(w: Writer) -> str:
    if w.chance(0.25):
        return w.invented_word().capitalize()
    country, (capital, *_) = w.pick(list(COUNTRIES.items()))
    return capital if w.chance(0.75) else country


def _wrapped(w: Writer, value: str | int, keys: str) -> str:
    """Return a result: the value alone, or in an object."""
    return str(value) if w.chance(0.5) else json.dumps({w.say("{" + keys + "}"): value})


def _weather(w: Writer) -> ToolUse:
    place, sky, degrees = _place(w), w.pick(_SKIES), int(w.rng.random() * 40)
    tool = _tool(
        w,
        "get_weather|get_weather|weather|current_weather|get_current_weather|weather_in|"
        "fetch_weather|check_weather|weather_report",
        {"city|city|location|place|town": "string"},
        "{Get|Returns|Look up|Tells|Find} the {current |}weather {in|of|for|at} "
        "{a city|a place|a location|the given city}{.|}",
    )
    question = _ask(
        w,
        "{{What is|What's|How is|Tell me|Check|Do you know|Find out} the weather {like |}in $place"
        "{ today| now| right now|}|Is it {$sky|raining|warm|cold} in $place{ today|}|"
        "Do I need {an umbrella|a coat} in $place|How {warm|cold} is it in $place|"
        "What is the temperature in $place|Weather in $place}?",
        place=place,
        sky=sky,
    )
    key = w.say("{temperature|temperature|temperature_c|temp|degrees|celsius}")
    sky_key = w.say("{sky|condition|conditions|weather|description|summary}")
    both = {key: degrees, sky_key: sky}
    draw = w.rng.random()
    if draw < 0.6:
        shapes = [both, {sky_key: sky, key: degrees}, {"city": place, **both}]
        text = w.say("{$t degrees and $s|$s, $t degrees|$s, $t C|$t°C, $s}", t=degrees, s=sky)
        result = json.dumps(w.pick(shapes)) if w.chance(0.6) else text
        answer = f"It is {sky} in {place}, at {degrees} degrees."
    elif draw < 0.8:
        result, answer = _wrapped(w, sky, sky_key), f"It is {sky} in {place}."
    else:
        result, answer = _wrapped(w, degrees, key), f"It is {degrees} degrees in {place}."
    return _use(tool, question, [place], f"the weather in {place}", result, answer)


def _time(w: Writer) -> str:
    return f"{int(w.rng.random() * 24):02}:{int(w.rng.random() * 60):02}"


_CLOCKS = "get_time|get_time|current_time|get_current_time|clock|local_time|what_time"
_TIMES = "time|time|local_time|now"


def _clock(w: Writer) -> ToolUse:
    time = _time(w)
    tool = _tool(w, _CLOCKS, {}, "{Get|Returns|Tells} the {current |}time{.|}")
    question = _ask(w, "{What time is it|What's the time|Tell me the time|What is the time}?")
    result = _wrapped(w, time, _TIMES)
    return _use(tool, question, [], "the time", result, f"It is {time}.")


def _clock_of_place(w: Writer) -> ToolUse:
    place, time = _place(w), _time(w)
    tool = _tool(
        w,
        _CLOCKS + "|time_in",
        {"city|city|place|location|timezone|zone": "string"},
        "{Get|Returns|Tells} the {current |local |}time {in|of|at} {a city|a place|a timezone}{.|}",
    )
    question = _ask(
        w,
        "{What time is it in $place|What's the time in $place|Tell me the time in $place|"
        "How late is it in $place}{ now|}?",
        place=place,
    )
    answer, result = f"It is {time} in {place}.", _wrapped(w, time, _TIMES)
    return _use(tool, question, [place], f"the time in {place}", result, answer)


def _date(w: Writer) -> ToolUse:
    date = f"20{20 + int(w.rng.random() * 20)}-{1 + int(w.rng.random() * 12):02}-"
    date += f"{1 + int(w.rng.random() * 28):02}"
    names = "get_date|today|current_date|get_today|calendar"
    tool = _tool(w, names, {}, "{Get|Returns|Tells} {the date|today's date|the current date}{.|}")
    question = _ask(w, "{What is the date{ today|}|What day is it today|What date is it}?")
    result = _wrapped(w, date, "date|date|today")
    return _use(tool, question, [], "the date", result, f"Today is {date}.")


def _number(w: Writer) -> int:
    return int(w.rng.random() * w.pick([10, 100, 100, 1000]))


def _operation(w: Writer) -> ToolUse:
    name = w.pick(list(_OPERATIONS))
    word, sign, compute = _OPERATIONS[name]
    a, b = _number(w), _number(w)
    kind = w.pick(["number", "number", "integer"])
    first, second = w.pick([("a", "b"), ("a", "b"), ("x", "y"), ("first", "second")])
    verb = {"add": "Adds", "subtract": "Subtracts", "multiply": "Multiplies"}[name]
    names = f"{name}|{name}|{name}_numbers|math_{name}"
    description = f"{{{verb}|{name}}} two numbers{{.|}}"
    tool = _tool(w, names, {first: kind, second: kind}, description, "sum")
    question = _sum_question(w, a, b, word, sign)
    return _sum_use(w, tool, question, [a, b], f"{a} {word} {b}", compute(a, b))


def _calculator(w: Writer) -> ToolUse:
    word, sign, compute = w.pick(list(_OPERATIONS.values()))
    a, b = _number(w), _number(w)
    tool = _tool(
        w,
        "calculate|calculator|evaluate|compute|calc|math",
        {"expression|expression|formula|input": "string"},
        "{Computes|Evaluates|Calculates} {an expression|a formula|arithmetic}{.|}",
        "sum",
    )
    question = _sum_question(w, a, b, word, sign)
    return _sum_use(w, tool, question, [f"{a} {sign} {b}"], f"{a} {word} {b}", compute(a, b))


def _sum_question(w: Writer, a: int, b: int, word: str, sign: str) -> str:
    return _ask(
        w,
        "{What is|What's|How much is|Calculate|Compute|} {$a $word $b|$a $word $b|$a $sign $b}?",
        a=a,
        b=b,
        word=word,
        sign=sign,
    )


def _sum_use(
    w: Writer, tool: Tool, question: str, values: Sequence[Any], term: str, value: int
) -> ToolUse:
    result = _wrapped(w, value, "result|result|value|answer|sum")
    return _use(tool, question, values, term, result, f"{term} is {value}.")


def _population(w: Writer) -> ToolUse:
    place = _place(w)
    count = f"{1 + int(w.rng.random() * 300)} {w.pick(['million', 'million', 'thousand'])}"
    tool = _tool(
        w,
        "get_population|population|population_of|count_people",
        {"country|city|place|name": "string"},
        "{Get|Returns|Tells} {the population|the number of people} of {a country|a city|a "
        "place}{.|}",
    )
    question = _ask(
        w,
        "{How many people live in $place|What is the population of $place|How big is $place}?",
        place=place,
    )
    result = _wrapped(w, count, "population|people|count|inhabitants")
    answer = f"{count} people live in {place}."
    return _use(tool, question, [place], f"the population of {place}", result, answer)


def _capital(w: Writer) -> ToolUse:
    country = w.pick(list(COUNTRIES)) if w.chance(0.7) else w.invented_word().capitalize()
    capital = COUNTRIES[country][0] if country in COUNTRIES else w.invented_word().capitalize()
    tool = _tool(
        w,
        "get_capital|find_capital|capital_of|capital|lookup_capital",
        {"country|country|name|state": "string"},
        "{Get|Returns|Tells|Find} the capital {city |}of a {country|state}{.|}",
        "capital",
    )
    question = _ask(
        w, "{What is|What's|Tell me|Find|Look up} the capital of $country?", country=country
    )
    result = _wrapped(w, capital, "capital|city|name|result")
    subject = f"the capital of {country}"
    return _use(
        tool, question, [country], subject, result, f"The capital of {country} is {capital}."
    )


def _price(w: Writer) -> ToolUse:
    thing = w.pick(THINGS)
    price = f"{1 + int(w.rng.random() * 500)} {w.pick(['euros', 'dollars', 'pounds'])}"
    tool = _tool(
        w,
        "get_price|price|find_price|price_of|lookup_price",
        {"item|product|thing|article|name": "string"},
        "{Get|Returns|Tells|Find} the price of {an item|a product|something}{.|}",
    )
    question = _ask(
        w,
        "{What does $a cost|How much is $a|What is the price of $a|How much does $a cost}?",
        a=with_article(thing),
    )
    result = _wrapped(w, price, "price|price|cost|amount")
    subject = f"the price of {with_article(thing)}"
    return _use(
        tool, question, [thing], subject, result, f"The price of {with_article(thing)} is {price}."
    )


def _timer(w: Writer) -> ToolUse:
    count, unit = 1 + int(w.rng.random() * 90), w.pick(["minutes", "seconds", "hours"])
    tool = _tool(
        w,
        "set_timer|start_timer|timer|set_alarm",
        {unit: "integer"},
        "{Sets|Starts} a timer{.|}",
        "",
    )
    question = _ask(
        w, "{Set|Start|Please set} a timer {for|of} $count $unit.", count=count, unit=unit
    )
    result = w.say("{ok|done|OK|started}") if w.chance(0.5) else '{"status": "ok"}'
    answer = f"The timer is set for {count} {unit}."
    return _use(tool, question, [count], "a timer", result, answer)


def _light(w: Writer) -> ToolUse:
    room, is_on = w.pick(_ROOMS), w.chance(0.5)
    state = "on" if is_on else "off"
    tool = _tool(
        w,
        "switch_light|set_light|light|control_light",
        {"room|place|where": "string", "on": "boolean"},
        "{Switches|Turns} a light on or off{.|}",
        "",
    )
    question = _ask(w, "{Turn|Switch} $state the light in the $room.", state=state, room=room)
    result = _wrapped(w, state, "light|state|status")
    answer = f"The light in the {room} is {state}."
    return _use(tool, question, [room, is_on], f"the light in the {room}", result, answer)


def _search(w: Writer) -> ToolUse:
    name = w.invented_word().capitalize()
    tool = _tool(
        w,
        "search|web_search|search_web|find|lookup|search_documents",
        {"query|query|question|text|q": "string"},
        "{Searches|Looks up} {the web|documents|facts}{.|}",
    )
    what = w.pick([*THINGS, w.invented_word().capitalize(), "telephone"])
    question = w.say(
        "{Who {invented|built|painted|wrote about|found} the $what|Who is $name|What is $name|"
        "Where is $name|When was $name born}?",
        what=what,
        name=name,
    )
    found = f"{w.pick(MEN + WOMEN)} {w.invented_word().capitalize()}"
    sentence = w.say(
        "{$found did it in $year.|It was $found.|$found, in $year.|It is a town near $found.|"
        "In the year $year.}",
        found=found,
        year=1500 + int(w.rng.random() * 500),
    )
    subject = "something to look up"
    return _use(tool, question, [question.rstrip("?")], subject, sentence, sentence)


def _invented(w: Writer) -> ToolUse:
    """A tool of which only the list tells anything."""
    name, key = w.invented_word(), w.invented_word()
    if w.chance(0.5):
        name = f"{w.say('{get|do|run|make|find|read}')}_{name}"
    is_number = w.chance(0.3)
    value = _number(w) if is_number else w.pick([w.invented_word().capitalize(), w.pick(THINGS)])
    tool = Tool(name, {key: "integer" if is_number else "string"}, "")
    question = w.say(
        "{Call|Use|Run|Please call} $name {with|for|on} {$key |}$value.",
        name=name,
        key=key,
        value=value,
    )
    outcome = w.pick([w.invented_word().capitalize(), _number(w)])
    result = _wrapped(w, outcome, "result|value|output")
    return _use(tool, question, [value], name, result, f"The result is {outcome}.")


_KINDS: list[Callable[[Writer], ToolUse]] = [
    _weather, _weather, _weather, _clock, _clock_of_place, _date, _operation, _operation,
    _calculator, _calculator, _population, _capital, _price, _timer, _light, _search, _invented,
]  # fmt: skip
