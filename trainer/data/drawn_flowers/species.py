"""The 102 classes of the drawn flowers: their shapes, colours and names. Plain data, no imports."""

from dataclasses import dataclass, replace

CLASSES = 102
VERSION = 1  # raise it whenever a change alters any picture: sets already in users' caches are named by it

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "white": (244, 242, 236),
    "cream": (246, 226, 160),
    "yellow": (248, 206, 30),
    "orange": (244, 126, 26),
    "red": (212, 30, 36),
    "pink": (242, 138, 172),
    "magenta": (206, 32, 128),
    "violet": (122, 58, 178),
    "blue": (70, 104, 216),
    "lime": (168, 196, 70),
    "maroon": (104, 16, 40),
    "brown": (92, 52, 22),
}

# shape -> (the noun in the class's name, petal width over petal length)
SHAPES: dict[str, tuple[str, float]] = {
    "round": ("buttercup", 0.95),
    "notched": ("primrose", 0.84),
    "ruffled": ("poppy", 1.05),
    "pointed": ("star", 0.56),
    "lance": ("lily", 0.40),
    "spoon": ("cosmos", 0.52),
    "strap": ("daisy", 0.26),
    "fringed": ("pink-flower", 0.74),
}

PATTERNS: dict[str, str] = {
    "plain": "",
    "throat": "{}-throated",
    "rim": "{}-edged",
    "stripe": "{}-striped",
    "veins": "{}-veined",
    "freckles": "{}-freckled",
    "tips": "{}-tipped",
}

CENTRES: dict[str, str] = {
    "button": "a yellow button",
    "dark": "a dark disc",
    "stamens": "long stamens",
    "trumpet": "an orange trumpet",
    "eye": "a small eye",
    "column": "a column",
}


@dataclass(frozen=True)
class Species:
    """The parameters that all pictures of one flower class share."""

    colour: str
    shape: str
    petals: int
    pattern: str
    second: str  # the pattern's colour; without meaning where the pattern is plain
    centre: str
    layers: int = 1

    @property
    def name(self) -> str:
        """A readable name of this flower class, different from the other 101."""
        doubled = {1: "", 2: "double ", 3: "triple "}[self.layers]
        pattern = PATTERNS[self.pattern].format(self.second)
        words = [f"{_NUMBERS[self.petals]}-petalled", pattern, f"{doubled}{self.colour}", SHAPES[self.shape][0]]
        return " ".join(word for word in words if word) + f" with {CENTRES[self.centre]}"


_NUMBERS = {
    3: "three",
    4: "four",
    5: "five",
    6: "six",
    7: "seven",
    8: "eight",
    9: "nine",
    10: "ten",
    12: "twelve",
    13: "thirteen",
    16: "sixteen",
    18: "eighteen",
    21: "twenty-one",
    26: "twenty-six",
}

# One line per family of three classes: the first, one that differs from it only in the number of petals, and one that
# differs only in one other trait. So no colour, shape, pattern or centre alone names a class.
_FAMILIES: list[tuple[Species, int, dict[str, str | int]]] = [
    (Species("white", "strap", 13, "plain", "white", "button"), 21, {"centre": "dark"}),
    (Species("white", "round", 5, "throat", "magenta", "stamens"), 8, {"shape": "notched"}),
    (Species("white", "lance", 6, "freckles", "maroon", "stamens"), 4, {"pattern": "stripe"}),
    (Species("white", "pointed", 6, "plain", "white", "trumpet"), 9, {"layers": 2}),
    (Species("cream", "ruffled", 4, "throat", "maroon", "dark"), 6, {"centre": "column"}),
    (Species("cream", "spoon", 8, "tips", "orange", "button"), 5, {"shape": "strap"}),
    (Species("cream", "round", 6, "rim", "pink", "stamens"), 10, {"layers": 3}),
    (Species("cream", "fringed", 5, "veins", "violet", "eye"), 7, {"pattern": "plain"}),
    (Species("yellow", "strap", 16, "plain", "yellow", "dark"), 26, {"shape": "pointed"}),
    (Species("yellow", "round", 5, "plain", "yellow", "stamens"), 7, {"pattern": "freckles", "second": "red"}),
    (Species("yellow", "pointed", 6, "plain", "yellow", "trumpet"), 8, {"centre": "eye"}),
    (Species("yellow", "spoon", 8, "throat", "maroon", "button"), 12, {"pattern": "tips"}),
    (Species("orange", "lance", 6, "freckles", "brown", "stamens"), 8, {"pattern": "stripe"}),
    (Species("orange", "ruffled", 4, "throat", "brown", "stamens"), 6, {"centre": "dark"}),
    (Species("orange", "strap", 18, "tips", "yellow", "button"), 12, {"layers": 2}),
    (Species("orange", "fringed", 8, "rim", "yellow", "button"), 5, {"shape": "notched"}),
    (Species("red", "ruffled", 4, "throat", "maroon", "dark"), 6, {"pattern": "rim", "second": "white"}),
    (Species("red", "pointed", 5, "plain", "red", "column"), 8, {"shape": "round"}),
    (Species("red", "round", 6, "plain", "red", "eye"), 9, {"layers": 3}),
    (Species("red", "strap", 13, "tips", "yellow", "dark"), 21, {"centre": "button"}),
    (Species("pink", "notched", 5, "throat", "white", "eye"), 7, {"pattern": "veins", "second": "magenta"}),
    (Species("pink", "round", 5, "veins", "magenta", "column"), 8, {"centre": "stamens"}),
    (Species("pink", "spoon", 8, "plain", "pink", "button"), 12, {"shape": "lance"}),
    (Species("pink", "lance", 6, "stripe", "white", "stamens"), 4, {"pattern": "freckles", "second": "maroon"}),
    (Species("pink", "ruffled", 6, "rim", "white", "stamens"), 10, {"layers": 2}),
    (Species("magenta", "fringed", 5, "rim", "white", "eye"), 8, {"shape": "pointed"}),
    (Species("magenta", "strap", 16, "plain", "magenta", "button"), 26, {"layers": 2}),
    (Species("magenta", "spoon", 6, "throat", "maroon", "stamens"), 9, {"centre": "trumpet"}),
    (Species("violet", "round", 5, "throat", "yellow", "eye"), 3, {"shape": "fringed"}),
    (Species("violet", "pointed", 5, "veins", "white", "stamens"), 8, {"pattern": "plain"}),
    (Species("violet", "strap", 13, "plain", "violet", "button"), 21, {"shape": "spoon"}),
    (Species("blue", "notched", 5, "throat", "white", "eye"), 4, {"centre": "stamens"}),
    (Species("blue", "lance", 6, "stripe", "violet", "trumpet"), 10, {"pattern": "tips", "second": "white"}),
    (Species("blue", "strap", 18, "rim", "white", "dark"), 12, {"centre": "button"}),
]


def species() -> list[Species]:
    """All flower classes in the order of their labels, 0 to 101."""
    return [
        kind
        for first, other_petals, other_trait in _FAMILIES
        for kind in (first, replace(first, petals=other_petals), replace(first, **other_trait))  # type: ignore[arg-type]
    ]


def chosen(classes: int) -> list[int]:
    """The numbers of the species of a set of ``classes`` classes (1 to 102), spread evenly over all species.

    Up to 34 classes are of different families, so they differ in more than one trait.
    """
    return [label * CLASSES // classes for label in range(classes)]


def colours(classes: int) -> list[list[float]]:
    """The red, green and blue, from 0 to 1, of the petals of each of a set's flower classes."""
    kinds = species()
    return [[value / 255 for value in COLOURS[kinds[number].colour]] for number in chosen(classes)]


def trait_names() -> list[str]:
    """The names of all traits that a flower can have: colours, shapes, patterns, centres, and several layers."""
    petals = {kind.colour for kind in species()}
    return [*(colour for colour in COLOURS if colour in petals), *SHAPES, *PATTERNS, *CENTRES, "layers"]


def traits(classes: int) -> list[list[int]]:
    """For each of a set's flower classes which traits it has, as 0 and 1 in the order of :func:`trait_names`."""
    kinds, names = species(), trait_names()
    found = []
    for number in chosen(classes):
        kind = kinds[number]
        own = {kind.colour, kind.shape, kind.pattern, kind.centre, *(["layers"] if kind.layers > 1 else [])}
        found.append([int(name in own) for name in names])
    return found


def class_names(classes: int = CLASSES) -> list[str]:
    """The readable, distinct names of a set's flower classes, in the order of the labels."""
    kinds = species()
    return [kinds[number].name for number in chosen(classes)]
