"""The 80 objects of COCO with other names of them, for CHAIR."""

from __future__ import annotations

_NAMES = """
person: human, man, woman, boy, girl, child, kid, baby, toddler, infant, adult, lady, gentleman, guy, teenager, teen, crowd,
    pedestrian, player, skier, snowboarder, skateboarder, surfer, rider, biker, cyclist, motorcyclist, batter, catcher, pitcher,
    umpire, driver, chef, waiter, waitress, bride, groom, soldier, officer, policeman, policewoman, police officer, fireman,
    firefighter, worker, student, passenger, spectator, tourist, businessman, businesswoman, mother, father, mom, dad, son,
    daughter, brother, sister, grandmother, grandfather, friend, somebody, someone
bicycle: bike, mountain bike, tricycle
car: automobile, sedan, van, suv, minivan, hatchback, convertible, coupe, jeep, taxi, taxicab, cab, limousine, limo, police car
motorcycle: motorbike, motor bike, motor cycle, scooter, moped, dirt bike
airplane: aeroplane, plane, aircraft, jet, airliner, jetliner, biplane, jumbo jet, passenger jet, fighter jet, seaplane
bus: minibus, double decker, school bus, tour bus, trolleybus
train: locomotive, railcar, tram, streetcar, subway train, steam engine, passenger train, freight train, bullet train
truck: lorry, pickup, pickup truck, semi truck, tow truck, fire truck, firetruck, fire engine, dump truck, garbage truck
boat: ship, sailboat, rowboat, canoe, kayak, ferry, yacht, speedboat, motorboat, raft, dinghy, gondola, tugboat, barge, catamaran
traffic light: traffic signal, stop light, stoplight
fire hydrant: hydrant, fireplug
stop sign
parking meter
bench: park bench, pew
bird: duck, duckling, goose, gull, seagull, pigeon, dove, parrot, parakeet, owl, eagle, hawk, falcon, swan, chicken, hen, rooster,
    ostrich, penguin, pelican, crow, raven, sparrow, robin, hummingbird, flamingo, peacock, heron, stork, cockatoo,
    woodpecker, finch, cardinal, bluebird, vulture
cat: kitten, kitty, feline, tabby
dog: puppy, pup, canine, doggy, terrier, poodle, bulldog, dalmatian, dachshund, retriever, golden retriever, labrador, sheepdog,
    german shepherd, husky, pug, chihuahua, beagle, collie, corgi, greyhound, spaniel
horse: pony, foal, stallion, mare, colt, bronco
sheep: lamb, ewe
cow: cattle, bull, calf, ox, oxen, heifer, bison, buffalo, longhorn
elephant: pachyderm
bear: polar bear, grizzly, grizzly bear, black bear, brown bear, panda, panda bear
zebra
giraffe
backpack: knapsack, rucksack, back pack, book bag
umbrella: parasol
handbag: purse, hand bag, pocketbook, shoulder bag
tie: necktie, neck tie, bow tie, bowtie
suitcase: luggage, suit case, briefcase
frisbee: flying disc, flying disk
skis: ski
snowboard: snow board
sports ball: ball, soccer ball, football, tennis ball, baseball ball, basketball, volleyball, beach ball
kite
baseball bat: bat
baseball glove: mitt, catcher mitt, baseball mitt
skateboard: skate board, longboard
surfboard: surf board, boogie board, bodyboard
tennis racket: racket, racquet, tennis racquet
bottle: beer bottle, wine bottle, water bottle
wine glass: wineglass, goblet, champagne glass
cup: mug, teacup, tea cup, coffee cup, coffee mug
fork: pitchfork
knife: pocketknife
spoon: tablespoon, teaspoon
bowl: cereal bowl, soup bowl
banana
apple
sandwich: burger, hamburger, cheeseburger, panini, sub sandwich
orange: tangerine, clementine
broccoli
carrot
hot dog: hotdog, frankfurter, chili dog, corn dog
pizza: pizza pie
donut: doughnut, bagel
cake: cupcake, cheesecake, birthday cake, wedding cake, shortcake
chair: armchair, stool, recliner, rocking chair, highchair, high chair, lawn chair
couch: sofa, loveseat, love seat, futon, settee
potted plant: house plant, houseplant, pot plant, plant, bonsai
bed: bunk bed, crib, cot
dining table: table, kitchen table, dinner table, coffee table, picnic table, desk
toilet: commode, urinal, toilet seat, toilet bowl
tv: television, television set, tv set, flat screen, flatscreen, monitor
laptop: laptop computer, notebook computer, netbook, computer
mouse: computer mouse
remote: remote control, controller, game controller, wii remote, wiimote
keyboard: computer keyboard
cell phone: cellphone, phone, mobile phone, smartphone, smart phone, iphone, telephone
microwave: microwave oven
oven: stove, stovetop, stove top
toaster
sink: washbasin, basin, wash basin
refrigerator: fridge, freezer, icebox
book: textbook, novel, magazine
clock: alarm clock, clock tower, wristwatch
vase: flower vase, urn
scissors: scissor, shears
teddy bear: teddy, stuffed bear, stuffed animal
hair drier: hair dryer, hairdryer, blow dryer, hairdrier
toothbrush: tooth brush
"""

_ANIMALS = ("bird", "cat", "dog", "horse", "sheep", "cow", "elephant", "bear", "zebra", "giraffe")


def _parsed() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in _NAMES.replace(",\n    ", ", ").strip().splitlines():
        name, _, others = line.partition(":")
        found[name] = tuple(filter(None, map(str.strip, others.split(","))))
    for name in _ANIMALS:  # a baby elephant is no person
        found[name] += tuple(f"{age} {name}" for age in ("baby", "adult", "mother"))
    return found


COCO_OBJECTS = _parsed()
"""Names of COCO's 80 objects, in COCO's order, with other names of each. Ambiguous words are left out ("glass", "crane",
"coach"), except for those that captions mostly use of the object ("orange", "bat", "plant", "pitcher")."""

_COMPOUNDS = """
train track, train station, train platform, train bridge, bus stop, bus station, boat house, boat dock,
bird house, bird feeder, bird cage, dog house, dog food, dog leash, cat food, horse stable, cow boy, car park,
car seat, car wash, truck stop, bike lane, bike path, bike rack, bicycle rack, kite string, toilet paper,
toilet brush, book shelf, book case, bed room, bed spread, cake stand, cake pan, pizza box, pizza cutter,
apple tree, apple juice, banana leaf, orange tree, orange juice, chair lift, ski lift, ski resort, ski slope,
ski pole, ski lodge, ski jump, umbrella stand, knife block, cup holder
"""
COCO_COMPOUNDS = tuple(" ".join(name.split()) for name in _COMPOUNDS.split(","))
"""Compounds that begin like an object of COCO and are another thing; CHAIR does not count them."""
