"""Words and facts the demo tasks are made of. Every word here is one token of the demo tokenizer."""

WORDS = (
    "apple arrow autumn baby ball banana basket beach bear bell bird boat book bottle bread bridge brush bucket "
    "button cake camel candle carrot castle cat chair cheese circle city clock cloud coat corn cow cup daisy desk "
    "dog donkey door dragon dream drum duck eagle ear earth egg engine eye falcon farm feather field finger fire "
    "fish flag flower fork forest fox frog garden gate ghost gift glass glove goat gold grape grass guitar hammer "
    "hand hat heart hill honey horse house ice island jacket jar jewel juice jungle key king kite knife ladder "
    "lake lamp leaf lemon letter lion map market melon milk mirror moon mountain mouse needle nest night nose oak "
    "ocean onion orange owl paint paper pear pencil piano pig pillow planet plum pocket pond queen rabbit rain "
    "ribbon river road robin rocket roof rope rose sail salt sand school sheep ship shirt shoe silver snow spoon "
    "star stone sugar sun table tiger tower train tree turtle umbrella valley violin wagon water whale wheel "
    "window winter wolf wood zebra"
).split()

ADJECTIVES = "big small old young red green blue white black quiet happy brave clever gentle hungry tall".split()
VERBS = "sees finds likes follows hides carries wants paints draws watches".split()
PLACES = "near behind under above beside".split()

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
LETTERS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
NATO = (
    "Alfa Bravo Charlie Delta Echo Foxtrot Golf Hotel India Juliett Kilo Lima Mike November Oscar Papa Quebec Romeo "
    "Sierra Tango Uniform Victor Whiskey Xray Yankee Zulu"
).split()
NUMBER_WORDS = "no one two three four five six seven eight nine ten".split()
ORDINALS = "first second third fourth fifth".split()

CAPITALS = {
    "Argentina": "Buenos Aires", "Australia": "Canberra", "Austria": "Vienna", "Belgium": "Brussels",
    "Brazil": "Brasilia", "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing",
    "Cuba": "Havana", "Denmark": "Copenhagen", "Egypt": "Cairo", "Finland": "Helsinki",
    "France": "Paris", "Germany": "Berlin", "Greece": "Athens", "Hungary": "Budapest",
    "Iceland": "Reykjavik", "India": "New Delhi", "Indonesia": "Jakarta", "Iran": "Tehran",
    "Ireland": "Dublin", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi",
    "Mexico": "Mexico City", "Morocco": "Rabat", "Nepal": "Kathmandu", "Netherlands": "Amsterdam",
    "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw", "Portugal": "Lisbon",
    "Russia": "Moscow", "Spain": "Madrid", "Sweden": "Stockholm", "Switzerland": "Bern",
    "Thailand": "Bangkok", "Turkey": "Ankara", "Ukraine": "Kyiv", "Vietnam": "Hanoi",
}  # fmt: skip

SOUNDS = {
    "cat": "meows", "dog": "barks", "cow": "moos", "sheep": "bleats", "pig": "grunts", "horse": "neighs",
    "duck": "quacks", "lion": "roars", "wolf": "howls", "frog": "croaks", "owl": "hoots", "mouse": "squeaks",
    "bee": "buzzes", "snake": "hisses", "donkey": "brays",
}  # fmt: skip

YOUNG = {
    "cat": "kitten", "dog": "puppy", "cow": "calf", "sheep": "lamb", "pig": "piglet", "horse": "foal",
    "duck": "duckling", "lion": "cub", "goat": "kid", "frog": "tadpole", "owl": "owlet", "swan": "cygnet",
    "hen": "chick", "goose": "gosling", "deer": "fawn",
}  # fmt: skip

COLOURS = {
    "grass": "green", "snow": "white", "blood": "red", "coal": "black", "milk": "white", "chocolate": "brown",
    "a carrot": "orange", "a banana": "yellow", "a tomato": "red", "a lemon": "yellow", "the clear sky": "blue",
    "an elephant": "grey", "a flamingo": "pink", "a raven": "black", "an emerald": "green",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "high": "low", "light": "dark", "wet": "dry", "old": "new",
    "full": "empty", "open": "closed", "early": "late", "strong": "weak", "near": "far", "rich": "poor",
    "hard": "soft", "long": "short", "loud": "quiet", "thick": "thin", "deep": "shallow", "clean": "dirty",
    "true": "false", "up": "down", "left": "right", "happy": "sad", "day": "night", "love": "hate",
}  # fmt: skip
