"""The tables of small facts that the corpus is written from."""

from tools.tiny_model.corpus_words import paragraphs, words

# country: capital, continent, language
COUNTRIES = {
    "France": ("Paris", "Europe", "French"),
    "Germany": ("Berlin", "Europe", "German"),
    "Italy": ("Rome", "Europe", "Italian"),
    "Spain": ("Madrid", "Europe", "Spanish"),
    "Portugal": ("Lisbon", "Europe", "Portuguese"),
    "England": ("London", "Europe", "English"),
    "Ireland": ("Dublin", "Europe", "English and Irish"),
    "Poland": ("Warsaw", "Europe", "Polish"),
    "Greece": ("Athens", "Europe", "Greek"),
    "Sweden": ("Stockholm", "Europe", "Swedish"),
    "Norway": ("Oslo", "Europe", "Norwegian"),
    "Denmark": ("Copenhagen", "Europe", "Danish"),
    "Finland": ("Helsinki", "Europe", "Finnish"),
    "Austria": ("Vienna", "Europe", "German"),
    "Hungary": ("Budapest", "Europe", "Hungarian"),
    "Russia": ("Moscow", "Europe and Asia", "Russian"),
    "Ukraine": ("Kyiv", "Europe", "Ukrainian"),
    "Turkey": ("Ankara", "Europe and Asia", "Turkish"),
    "Japan": ("Tokyo", "Asia", "Japanese"),
    "China": ("Beijing", "Asia", "Chinese"),
    "India": ("New Delhi", "Asia", "Hindi and English"),
    "Thailand": ("Bangkok", "Asia", "Thai"),
    "Vietnam": ("Hanoi", "Asia", "Vietnamese"),
    "South Korea": ("Seoul", "Asia", "Korean"),
    "Egypt": ("Cairo", "Africa", "Arabic"),
    "Morocco": ("Rabat", "Africa", "Arabic"),
    "Kenya": ("Nairobi", "Africa", "Swahili and English"),
    "Canada": ("Ottawa", "North America", "English and French"),
    "Mexico": ("Mexico City", "North America", "Spanish"),
    "the United States": ("Washington", "North America", "English"),
    "Cuba": ("Havana", "North America", "Spanish"),
    "Brazil": ("Brasilia", "South America", "Portuguese"),
    "Argentina": ("Buenos Aires", "South America", "Spanish"),
    "Chile": ("Santiago", "South America", "Spanish"),
    "Peru": ("Lima", "South America", "Spanish"),
    "Australia": ("Canberra", "Oceania", "English"),
    "New Zealand": ("Wellington", "Oceania", "English"),
}

# animal: group, legs, sound, young, home, food
ANIMAL_FACTS = {
    "dog": ("mammal", 4, "barks", "puppy", "with people", "meat"),
    "cat": ("mammal", 4, "meows", "kitten", "with people", "meat and fish"),
    "cow": ("mammal", 4, "moos", "calf", "on a farm", "grass"),
    "sheep": ("mammal", 4, "bleats", "lamb", "on a farm", "grass"),
    "horse": ("mammal", 4, "neighs", "foal", "on a farm", "grass and hay"),
    "pig": ("mammal", 4, "oinks", "piglet", "on a farm", "almost anything"),
    "lion": ("mammal", 4, "roars", "cub", "in the grasslands", "meat"),
    "wolf": ("mammal", 4, "howls", "pup", "in the forest", "meat"),
    "bear": ("mammal", 4, "growls", "cub", "in the forest", "berries, fish, and honey"),
    "mouse": ("mammal", 4, "squeaks", "pup", "in a hole", "seeds and grain"),
    "fox": ("mammal", 4, "barks and screams", "cub", "in a den", "mice and berries"),
    "elephant": ("mammal", 4, "trumpets", "calf", "in the grasslands", "grass and leaves"),
    "duck": ("bird", 2, "quacks", "duckling", "on a pond", "plants and insects"),
    "hen": ("bird", 2, "clucks", "chick", "on a farm", "grain and worms"),
    "owl": ("bird", 2, "hoots", "owlet", "in a tree", "mice"),
    "crow": ("bird", 2, "caws", "chick", "in a tree", "almost anything"),
    "frog": ("amphibian", 4, "croaks", "tadpole", "near a pond", "insects"),
    "snake": ("reptile", 0, "hisses", "hatchling", "in warm places", "mice and eggs"),
    "bee": ("insect", 6, "buzzes", "larva", "in a hive", "nectar and pollen"),
}

COLOURS = {
    "blue": ["the sky", "the sea"],
    "green": ["grass", "a leaf", "a frog", "a cucumber"],
    "yellow": ["the sun", "a banana", "a lemon", "a sunflower"],
    "red": ["blood", "a tomato", "a strawberry", "a fire engine", "a cherry"],
    "white": ["snow", "milk", "salt", "a swan"],
    "black": ["coal", "a crow", "the night sky"],
    "orange": ["a carrot", "an orange", "a pumpkin"],
    "brown": ["chocolate", "a bear", "wood", "coffee"],
    "purple": ["lavender", "an eggplant", "a plum"],
    "pink": ["a flamingo", "a pig"],
    "grey": ["an elephant", "a mouse", "a rain cloud"],
}
MIXES = [
    ("red", "blue", "purple"), ("red", "yellow", "orange"), ("blue", "yellow", "green"),
    ("red", "white", "pink"), ("black", "white", "grey"),
]  # fmt: skip
OPPOSITES = words(
    "hot/cold big/small fast/slow up/down day/night happy/sad good/bad light/dark "
    "old/new rich/poor "
    "early/late wet/dry hard/soft high/low open/closed full/empty strong/weak "
    "left/right loud/quiet "
    "near/far long/short heavy/light clean/dirty first/last true/false love/hate begin/end"
)
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    "January February March April May June July August September October November December"
)
LISTS = {
    "fruits": "apples bananas oranges pears grapes cherries lemons plums strawberries mangoes",
    "vegetables": "carrots potatoes tomatoes onions peas beans spinach cabbage cucumbers corn",
    "animals": "lions bears foxes owls dolphins horses frogs rabbits elephants bees",
    "colors": "red blue green yellow orange purple white black brown pink",
    "birds": "owls ducks crows parrots penguins eagles swans hens sparrows robins",
    "countries": "France Germany Italy Spain Japan China India Egypt Canada Brazil",
    "cities": "Paris London Berlin Rome Madrid Tokyo Cairo Ottawa Athens Vienna",
    "musical instruments": "piano guitar violin drums flute trumpet harp cello clarinet organ",
    "sports": "football tennis swimming running cycling skiing basketball golf rowing hockey",
    "drinks": "water tea coffee milk juice lemonade cocoa",
    "planets": "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune",
    "tools": "hammer saw screwdriver drill pliers wrench ladder shovel",
    "flowers": "roses tulips daisies lilies sunflowers violets poppies",
    "shapes": "circle square triangle rectangle star oval",
}
NUMBER_WORDS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)

# A question, then its answer.
GENERAL = paragraphs("""\
How many {days are there in a week|days does a week have|days are in one week}?
A week has seven days.

How many months {are there in a year|does a year have}?
A year has twelve months.

How many days {are there in a year|does a year have}?
A year has 365 days. A leap year has 366.

How many hours {are there in a day|does a day have}?
A day has 24 hours.

How many minutes {are there in an hour|does an hour have}?
An hour has 60 minutes.

How many seconds {are there in a minute|does a minute have}?
A minute has 60 seconds.

How many letters {are in the alphabet|does the English alphabet have}?
The English alphabet has 26 letters.

How many planets {are there|does the solar system have|are in the solar system}?
There are eight planets in the solar system.

{What is the largest planet|Which planet is the biggest}?
Jupiter is the largest planet in the solar system.

{What is|Which is} the {largest|biggest} animal{ in the world| on Earth|}?
The blue whale is the largest animal on Earth.

{What is|Which is} the {tallest|highest} mountain{ in the world|}?
Mount Everest is the highest mountain on Earth.

{What is|Which is} the {largest|biggest} ocean{ in the world|}?
The Pacific is the largest ocean.

{What is|Which is} the fastest {land animal|animal on land}?
The cheetah is the fastest animal on land.

{What is|Which is} the tallest animal?
The giraffe is the tallest animal.

{When does water freeze|At what temperature does water freeze}?
Water freezes at 0 degrees Celsius.

{When does water boil|At what temperature does water boil}?
Water boils at 100 degrees Celsius at sea level.

What is {ice|ice made of}?
Ice is frozen water.

What is {rain|rain made of}?
Rain is water that falls from the clouds in drops.

What is {the sun|our sun}?
The sun is a star. It gives the Earth light and warmth.

What is the moon?
The moon is a ball of rock that travels around the Earth.

{Where does the sun rise|In which direction does the sun rise}?
The sun rises in the east and sets in the west.

What do bees make?
Bees make honey.

{Where does milk come from|Where do we get milk from}?
Milk comes from cows, and also from goats and sheep.

{How many legs does a spider have|How many legs do spiders have}?
A spider has eight legs.

{What are the seasons|Name the {four |}seasons|Which seasons are there}?
The four seasons are spring, summer, autumn, and winter.

{How many seasons are there|How many seasons does a year have}?
There are four seasons: spring, summer, autumn, and winter.

{How many|What are the} continents{| are there}?
There are seven continents: Africa, Antarctica, Asia, Europe, North America, Oceania, and South \
America.

{What is a prime number|Explain prime numbers}?
A prime number can be divided only by one and by itself. Examples are 2, 3, 5, and 7.

{What do plants need|What does a plant need to grow}?
Plants need water, light, and air.

{What are the primary colors|Name the primary colors}?
The primary colors are red, yellow, and blue.

What are the colors of the rainbow?
The colors of the rainbow are red, orange, yellow, green, blue, indigo, and violet.

Why is the sky blue?
The air scatters blue light more than red light. So blue light comes to us from every side.

{Can penguins fly|Do penguins fly}?
No, penguins cannot fly, but they swim very well.

{How many wheels does a car have|How many wheels are on a car}?
A car has four wheels.

How many wheels does a {bicycle|bike} have?
A bicycle has two wheels.

How many sides does a {triangle have|square have}?
A triangle has three sides, and a square has four.

How many fingers {do people have|does a hand have|are on a hand}?
A hand has five fingers, so most people have ten.

{What is water made of|What is water}?
Water is made of hydrogen and oxygen.

{What is bread made of|What do you need for bread}?
Bread is made of flour, water, salt, and yeast.

{Where do fish live|Where does a fish live}?
Fish live in water.

{Which season comes after winter|What comes after winter}?
Spring comes after winter.

{Which season comes after summer|What comes after summer}?
Autumn comes after summer.

{Which season is the coldest|What is the coldest season}?
Winter is the coldest season.

{Which season is the warmest|What is the warmest season|When is it hot}?
Summer is the warmest season.

{What is the first month of the year|Which month is the first}?
January is the first month of the year.

{What is the last month of the year|Which month is the last}?
December is the last month of the year.

{Which planet do we live on|What is our planet called|On which planet do we live}?
We live on the planet Earth.

{Which planet is the closest to the sun|What is the closest planet to the sun}?
Mercury is the planet closest to the sun.

{Which planet is red|Which is the red planet|What is the red planet}?
Mars is called the red planet.

{How many letters does the word cat have|How many letters are in cat}?
The word cat has three letters.

What is the first letter of the alphabet?
The first letter of the alphabet is A.

What is the last letter of the alphabet?
The last letter of the alphabet is Z.

{Say|Tell me|What is|Recite} the alphabet{.|?}
A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.

{What is the largest country|Which country is the biggest}{ in the world|}?
Russia is the largest country in the world.

{What is a forest|What is a wood}?
A forest is a large area with many trees.

{What is a river|What are rivers}?
A river is water that flows through the land to the sea.

{What is snow|What is snow made of}?
Snow is frozen water that falls from the clouds as flakes.

{What is a star|What are stars}?
A star is a very hot ball of gas that shines. The sun is one.

{How do birds fly|Why can birds fly}?
Birds fly by moving their wings, and their bones are light.

{What do {cows|sheep|horses} eat}?
They eat mostly grass and hay.

{What do cats eat|What does a cat like to eat}?
Cats eat meat and fish.

{What is a book|What are books for}?
A book is a set of pages with text or pictures to read.
""")
