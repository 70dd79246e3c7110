"""Word lists. No word stands in two lists, so a checker can tell what a word is from the word."""

from __future__ import annotations

GIRLS = (
    "Anna", "Bella", "Clara", "Daisy", "Emma", "Freya", "Grace", "Hanna", "Iris", "Julia",
    "Kate", "Lily", "Mia", "Nora", "Olive", "Paula", "Rosa", "Sara", "Tina", "Vera",
)  # fmt: skip
BOYS = (
    "Adam", "Ben", "Carl", "David", "Erik", "Felix", "George", "Hugo", "Ivan", "Jack",
    "Kevin", "Leo", "Max", "Noah", "Oscar", "Peter", "Ravi", "Sam", "Tom", "Victor",
)  # fmt: skip
NAMES = GIRLS + BOYS
ANIMALS = (
    "fox", "rabbit", "owl", "bear", "mouse", "turtle", "squirrel", "hedgehog", "duck", "goat",
    "pony", "badger", "frog", "crow", "kitten", "puppy", "lamb", "otter", "beaver", "swan",
    "donkey", "parrot", "hamster", "goose",
)  # fmt: skip
ADJECTIVES = (
    "small", "old", "friendly", "shy", "clever", "hungry", "sleepy", "brave", "funny", "proud",
    "curious", "gentle", "lazy", "noisy", "polite", "tired",
)  # fmt: skip
OBJECTS = (
    "ball", "kite", "lamp", "basket", "hat", "scarf", "book", "box", "drum", "bell", "boat",
    "wagon", "blanket", "umbrella", "lantern", "bucket", "flute", "map", "mirror", "pillow",
    "ribbon", "spoon", "teapot", "whistle",
)  # fmt: skip
COLOURS = (
    "red", "blue", "green", "yellow", "purple", "white", "black", "orange", "golden", "silver",
)  # fmt: skip
PLACES = (
    "by the river", "in the forest", "on the hill", "near the lake", "in the garden",
    "at the beach", "in the village", "behind the barn", "under the bridge", "in the park",
    "at the market", "by the mill", "in the meadow", "near the castle", "at the harbour",
    "beside the pond", "in the valley", "on the farm",
)  # fmt: skip
WEATHERS = ("sunny", "rainy", "windy", "foggy", "snowy", "cloudy", "stormy", "frosty")
GOODS = (
    "clock", "chair", "saddle", "rope", "hammer", "candle", "carpet", "violin", "ladder", "shovel",
)  # fmt: skip
"""What a friend trades. A list of its own: greedy text would give both children the same thing."""
SPOTS = (
    "behind the shed", "under the stairs", "near the well", "by the gate", "on the roof",
    "inside the tent", "below the window", "beside the haystack",
)  # fmt: skip
"""Where a child hides; never where the story begins, for the same reason."""
UNITS = (
    "apples", "shells", "nuts", "berries", "pears", "buttons", "stones", "cards", "marbles",
    "stamps", "plums", "coins", "feathers", "pencils",
)  # fmt: skip
THINGS = ("sky", "air", "grass", "path", "light", "wind", "ground", "world")
LOOKS = ("soft", "quiet", "bright", "warm", "still", "cool", "fresh", "calm", "clear", "sweet")


def with_article(word: str) -> str:
    """The word after "a" or "an"."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
