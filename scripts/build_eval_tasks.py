#!/usr/bin/env python3
"""Writes the evaluation tasks that ship with equiport: two lm_eval task files and their items.

`agreement`: which form of "to be" follows a short phrase whose nearest noun may be of the other number, as in "The keys
near the door" (are / is). `kinds`: what a thing is, four choices, as in "A walnut is a kind of" (nut / bird / metal /
game). Contexts are a few tokens long and every choice is one word, so that an item costs one short forward.
The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from equiport.errors import EquiportError
from equiport.experiment.atomic import write_text

ITEMS = 600
NOUNS = (
    "key", "dog", "teacher", "door", "book", "car", "boat", "tree", "house", "letter", "student", "doctor", "farmer",
    "picture", "flower", "chair", "road", "bird", "river", "window", "table", "song", "king", "soldier", "girl", "boy",
    "horse", "ship", "store", "garden",
)  # fmt: skip
PREPOSITIONS = ("near", "behind", "with", "from", "beside", "under")
KINDS = {
    "bird": "robin eagle sparrow pigeon hawk owl parrot crow raven swan falcon penguin seagull woodpecker finch duck "
            "turkey peacock ostrich heron pelican canary hummingbird stork vulture",
    "fish": "salmon trout tuna cod herring carp sardine mackerel halibut catfish anchovy haddock perch pike flounder "
            "tilapia sturgeon snapper swordfish goldfish minnow barracuda piranha",
    "fruit": "banana apple mango pear peach grape plum cherry lemon lime melon papaya pineapple strawberry raspberry "
             "blueberry apricot kiwi fig watermelon grapefruit nectarine coconut guava tangerine",
    "vegetable": "carrot cabbage onion potato spinach broccoli lettuce cauliflower turnip radish celery cucumber "
                 "eggplant zucchini leek beet asparagus parsnip artichoke kale garlic",
    "tree": "oak maple willow birch pine cedar elm spruce redwood poplar sycamore cypress chestnut sequoia beech fir "
            "eucalyptus aspen hemlock juniper magnolia",
    "metal": "copper iron silver gold tin zinc nickel aluminum lead titanium platinum chromium cobalt tungsten steel "
             "mercury magnesium brass bronze lithium",
    "tool": "hammer wrench screwdriver saw drill chisel shovel rake pliers axe crowbar spade hoe sander trowel "
            "pickaxe mallet clamp",
    "vehicle": "truck bus van motorcycle bicycle tractor ambulance taxi scooter trailer limousine minivan tram "
               "jeep sedan pickup wagon",
    "sport": "football tennis basketball hockey golf baseball volleyball rugby cricket badminton wrestling boxing "
             "swimming gymnastics lacrosse softball polo fencing skiing surfing",
    "instrument": "violin piano guitar flute trumpet cello drum clarinet harp saxophone trombone banjo oboe "
                  "mandolin tuba harmonica accordion ukulele viola bassoon lute",
    "insect": "ant bee beetle butterfly mosquito wasp grasshopper moth cricket dragonfly fly ladybug termite "
              "cockroach flea hornet mantis locust firefly",
    "country": "France Germany Spain Italy Japan China India Brazil Canada Mexico Egypt Kenya Norway Sweden Poland "
               "Greece Turkey Chile Peru Cuba Thailand Vietnam Nigeria Ireland Portugal",
    "color": "red blue green yellow orange purple pink brown gray black white violet turquoise magenta crimson "
             "scarlet indigo beige maroon teal",
    "language": "English French German Spanish Italian Russian Japanese Arabic Hindi Greek Latin Portuguese Turkish "
                "Korean Polish Swedish Dutch Hebrew Persian Swahili",
    "drink": "coffee tea milk juice lemonade beer wine whiskey soda cider vodka rum cocoa champagne brandy gin",
}  # fmt: skip
TEMPLATES = ("A {} is a kind of", "Is {} a", "The word {} names a")
TASKS = {
    "agreement": "Number agreement: is or are after a short phrase",
    "kinds": "What kind of thing a word names, four choices",
}


def agreement_items(generator: random.Random) -> list[dict[str, object]]:
    """Half singular, half plural heads; the noun before the verb is of either number."""
    items: dict[str, dict[str, object]] = {}
    while len(items) < ITEMS:
        plural = len(items) % 2
        head, other = generator.sample(NOUNS, 2)
        near = other + generator.choice(("", "s"))
        context = f"The {head}{'s' if plural else ''} {generator.choice(PREPOSITIONS)} the {near}"
        items.setdefault(context, {"context": context, "choices": ["is", "are"], "answer": plural})
    return list(items.values())


def kinds_items(generator: random.Random) -> list[dict[str, object]]:
    """Each word in one kind only; wrong choices are drawn among the other kinds."""
    words = [(word, kind) for kind, text in KINDS.items() for word in text.split()]
    names = [word for word, _ in words]
    words = [(word, kind) for word, kind in words if names.count(word) == 1]
    pairs = [(template.format(word), kind) for template in TEMPLATES for word, kind in words]
    items = []
    for context, kind in generator.sample(pairs, ITEMS):
        choices = [kind, *generator.sample([other for other in KINDS if other != kind], 3)]
        generator.shuffle(choices)
        items.append({"context": context, "choices": choices, "answer": choices.index(kind)})
    return items


def build(output: Path, seed: int) -> list[Path]:
    """Write the task files and items into `output`.

    Raises:
        EquiportError: the folder cannot be written.
    """
    makers = {"agreement": agreement_items, "kinds": kinds_items}
    written = []
    for name, described in TASKS.items():
        items = makers[name](random.Random(f"{name}-{seed}"))
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)
        written.append(write_text(output / f"{name}.jsonl", lines))
        written.append(write_text(output / f"{name}.yaml", _task_file(name, described, seed)))
    return written


def _task_file(name: str, described: str, seed: int) -> str:
    return f"""# {described}; {ITEMS} items. Written by scripts/build_eval_tasks.py --seed {seed}.
task: equiport_{name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {name}.jsonl
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
metadata:
  version: 1
"""


def main(argv: list[str] | None = None) -> int:
    """Parse flags, write, print what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--output", type=Path, required=True, help="folder of the task files, e.g. benchmarks")
    parser.add_argument("--seed", type=int, default=42)
    given = parser.parse_args(argv)
    try:
        for path in build(given.output, given.seed):
            print(path)
    except EquiportError as error:
        print(f"equiport: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
