"""The grammar that stories are told from: eight plots and the words that fill them."""

from tools.tiny_model.corpus_words import paragraphs, words

ADJECTIVES = words(
    "little small young clever brave kind shy cheerful curious quiet lonely friendly gentle lazy "
    "funny old happy tiny proud patient"
)
PLACES = [
    "in a green forest", "near a wide river", "on a small farm", "by the sea", "on a high hill",
    "in a quiet village", "under an old oak tree", "in a sunny garden", "in a warm valley",
    "at the edge of a big city", "on a small island", "beside a deep blue lake",
    "in a little stone house", "in a windy meadow",
]  # fmt: skip
TREASURES = [
    "key", "hat", "ring", "red scarf", "map", "lantern", "book", "golden coin", "blue button",
    "drum", "flute", "basket", "silver spoon", "letter", "umbrella", "compass", "yellow ball",
    "small bell",
]  # fmt: skip
FOODS = [
    "apples", "honey", "cheese", "berries", "nuts", "plums", "corn", "carrots", "raisins", "pears"
]  # fmt: skip
SKILLS = [
    "swim", "sing", "dance", "whistle", "paint", "juggle", "climb the tall tree", "fly a kite",
    "play the drum", "skate on the ice", "bake bread", "tell the time",
]  # fmt: skip
SIGHTS = [
    "the sea", "the snow on the mountain", "the stars from the highest hill", "the old castle",
    "the big waterfall", "the lights of the city", "the end of the rainbow", "the desert",
]  # fmt: skip

# One plot per paragraph, one beat per line.
PLOTS = paragraphs("""\
One {sunny morning|windy day|cold evening|rainy afternoon}, $name {could not find|lost} $his \
$treasure.
$He looked {under the bed|behind the door|in the tall grass|near the well}, but it was {not \
there|gone}.
{$name felt very sad.|$name sat down and began to cry.|$name did not know what to do.}
Then $friend, {a wise|a friendly|a helpful} $friend_kind, came by and asked, "{What is \
wrong|Why are you so sad}, $name?"
{Together they searched|The two of them looked} everywhere{ until the sun went down|, high and \
low|}.
At last $friend {found|saw} the $treasure {on top of the roof|inside an old boot|under a pile \
of leaves|in the branches of a tree}.
$name {laughed with joy|was so happy that $he danced} and {thanked $friend|gave $friend a big \
hug}.
{From that day on, they were best friends.|After that, $name always took good care of the \
$treasure.|They walked home together and had hot soup.}

$name {wanted to learn|dreamed of learning} to $skill.
{Every morning|Every day after breakfast|Each evening} $he {practiced|tried} {for an hour|again \
and again}, but it {never worked|always went wrong}.
Some of the others laughed and said, "You will never $skill!"
Only $friend the $friend_kind {did not laugh|was kind}.
"{Do not give up|Be patient|Take it slowly}," said $friend. "{Every day you get a little \
better.|Nobody can do it on the first day.|I will help you.}"
So $name {kept trying|tried once more}, {day after day|week after week|step by step}.
{One fine day|At the end of the summer|When spring came}, $name could $skill better than \
anyone{ in the land|}.
{The others clapped, and nobody laughed any more.|Now $he teaches all the little ones how to \
$skill.|And $he never forgot the kind words of $friend.}

One {cold|snowy|grey} day, $name {had nothing left but some $food|had only some $food left}.
{On the road|At the door|By the path} $he met {a hungry|a tired|a poor old} $friend_kind named \
$friend.
"{I have not eaten all day|I am so hungry}," said $friend{ in a quiet voice|}.
$name {thought for a moment|looked at the $food} and then {gave $friend half of the \
$food|shared everything with $friend}.
{They ate together|They sat by the fire} and {told each other stories|talked until the moon \
came up}.
{Many weeks later|When winter came}, a storm {took the roof from the home of $name|left $name \
with nothing to eat}.
Then $friend came back with {all of the family|ten good friends} and {helped|brought food and \
warm blankets}.
{A kind heart is never poor.|What you give comes back to you.|$name smiled, because a good \
friend is worth more than gold.}

$name had always wanted to see $sight.
{So one morning|One day in spring}, $he packed some $food and {set off|began to walk}.
On the way $he met $friend, {a lost|a merry|a sleepy} $friend_kind, and they {went on \
together|became friends at once}.
They {crossed|walked around} {a wide river|a dark forest|a muddy field} and {slept under the \
stars|sang songs to keep warm}.
{On the third day|After seven days|Before the sun rose}, they {climbed one last hill|turned one \
last corner} and stopped.
There it was: $sight!
"{It is more beautiful than I dreamed|I will never forget this}," {said|whispered} $name.
{Then they went home and told everyone about it.|They stayed until evening, and then the long \
way home seemed short.|It was the best day of their lives.}

{Tomorrow was|It was almost} the birthday of $friend the $friend_kind.
$name wanted to {make|bake} a {big|sweet|wonderful} cake, but there was no \
{flour|sugar|butter|milk} in the house.
First $he went to the {mill|market|neighbors}, but {it was closed|nobody was home}.
Then $he {had an idea|remembered something}: $he could make a cake of $food!
$name {worked|mixed and stirred} all night long{ and even sang a little song|}.
In the morning $friend {opened the door|came down the path} and {saw|smelled} the cake.
"{This is the best cake in the world|Nobody ever made me such a cake}," said $friend.
{They ate every crumb and danced until evening.|Everyone got a piece, and everyone was happy.|A \
gift from the heart is always the right one.}

One {dark|stormy|quiet} night, $name heard a strange noise.
{Tap, tap, tap!|Scratch, scratch, scratch!|Boom, boom, boom!} {It came from the roof.|It came \
from behind the door.|It came from the old barn.}
$name was {afraid|scared}, but $he {took a lantern|lit a candle} and went to look.
{Slowly|Very slowly|With shaking hands}, $he {opened the door|looked around the corner}.
There sat $friend, {a wet|a cold|an embarrassed} $friend_kind, {looking for a dry place to \
sleep|trying to find the way home}.
"{I am sorry that I woke you|Please do not be angry}," said $friend.
$name {began to laugh|smiled} and {made some hot tea|shared a warm blanket}.
{Since then, $name has not been afraid of the dark.|They talked all night, and the storm did \
not matter any more.|Sometimes a scary noise is only a new friend.}

{Every year|Every summer} there was a great race {around the lake|up the hill|through the \
woods}.
$friend the $friend_kind was {very fast|the fastest of all} and {said so to everyone|liked to \
boast}.
$name was {slow|not very fast}, but $he {did not mind|wanted to try}.
When the race began, $friend {ran ahead|was soon out of sight} and then {lay down for a \
nap|stopped to eat some $food}.
$name {went on and on|never stopped}, {one step at a time|with a song on $his lips}.
When $friend {woke up|looked up}, $name was already {close to the finish|at the finish line}!
{Everyone cheered|The crowd clapped} for $name, {the winner|the surprise of the day}.
{Slow and steady wins the race.|$friend laughed too and said, "Well done, $name!"|And $friend \
never boasted again.}

One day $name found a {tiny|strange|shiny} seed {on the path|in an old box|under a stone}.
$He {planted it|put it in the ground} {behind the house|near the gate|in the middle of the \
garden} and {watered it every day|waited}.
{For a long time nothing happened.|A week went by, and then another.|The others said that it \
would never grow.}
But $name {was patient|did not give up}{ and sang to it every evening|}.
Then, one {warm|bright} morning, there was a {green leaf|little plant}, and soon {a tall tree|a \
flower as big as a hat}.
$friend the $friend_kind {came to look|could not believe it} and asked, "How did you do that?"
"{With water, sun, and time|I just took care of it}," said $name.
{Now they sit in its shade and drink lemonade.|The next year there were a hundred of them.|Good \
things need time to grow.}
""")

# What leads from one plot into the next.
LATER = [
    (
        "{Some weeks later|When the next summer came|Not long after that|The year after "
        "that}, there was another adventure."
    ),
    "But that is not the end of the story.",
    "{And then|One month later} something else happened.",
]

THEMES = words(
    "friendship love courage winter summer rain snow magic kindness hope music "
    "dreams home patience "
    "night sharing school autumn spring nature happiness luck"
)
