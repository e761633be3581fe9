"""Steer the sentiment of what a model writes, and measure it beside directions that mean nothing.

The direction is the difference of the mean rows of a few sentences and of their opposites, at one layer. It is added to
every row but the first, in both directions, while the model goes on from 50 neutral sentences.
"""

import argparse
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import midstream as ms
from midstream.formats.vectors import write_vectors

LAYER, STRENGTH = 17, 1.5
OPENING = "It was"
ROWS = "sequence[1:]"  # the first row is a massive activation in this model: left as it is

PAIRS = [
    ("I love this place, it is wonderful.", "I hate this place, it is terrible."),
    ("What a delightful evening we had with them.", "What a miserable evening we had with them."),
    ("The service was superb and the staff were kind.", "The service was dreadful and the staff were rude."),
    ("She smiled, because the news was marvellous.", "She cried, because the news was horrible."),
    ("This is the finest book I have read in years.", "This is the worst book I have read in years."),
    ("He was thrilled with the charming little house.", "He was disgusted with the ugly little house."),
    ("Everything went right, and we were delighted.", "Everything went wrong, and we were upset."),
    ("It tastes fantastic, I can only recommend it.", "It tastes awful, I can only warn you of it."),
]

TUNING = """
The postman came up the road at noon.
We painted the kitchen in the spring.
The class went to the museum on Tuesday.
He read the report on the train.
My sister started at a new school.
They opened a shop near the station.
I took the dog to the park before work.
The band played in the town hall.
She ordered soup and a sandwich.
Our flight left from the other terminal.
The doctor called me back in the afternoon.
A man in a grey coat sat down beside us.
The company sent me a new phone.
We watched the match at my uncle's house.
The teacher gave the class a test.
It rained for most of the day.
"""

PROMPTS = """
My brother cooked dinner for us on Sunday.
The film started at eight o'clock.
We stayed in a hotel by the river.
Our new neighbour came over in the evening.
I bought a coat at the market.
The train to the coast took four hours.
She showed me the letter from her aunt.
They moved to a flat in the city.
He has worked at the bank for two years.
The waiter brought the bill.
I spoke to my boss after the meeting.
The children walked home from school.
We drove to the mountains in June.
Anna rented a car at the airport.
The café on the corner has a new owner.
My parents visited us in October.
He wrote a song about his village.
The lecture was about the history of Rome.
I ordered a lamp from a catalogue.
Our team played against the students.
The garden behind the house is long and narrow.
She cut her hair on Monday.
We had lunch at the office.
The bus stopped in front of the library.
Tom told us about his trip to Norway.
I called the bank this morning.
The cat slept under the table.
They built a bridge over the canal.
My cousin sent a photo of her room.
The play lasted three hours.
We met the new manager on Friday.
He repaired the roof with his father.
The museum has a room with old maps.
I read the first chapter last night.
She teaches chemistry at the college.
The box contained a pair of shoes.
We took the ferry to the island.
The guests arrived around seven.
He made coffee for everyone.
My phone rang during the concert.
The town council met on Wednesday.
I walked along the beach in the morning.
Our hosts lived in a house with a blue door.
She asked the clerk about the ticket.
The workers finished the road in March.
We listened to the radio in the car.
A student from Brazil joined the course.
The bakery sells bread and cake.
He put the chair next to the window.
The journey back was by bus.
"""

# Words that count. None of them is in the pairs above, so that repeating those would score nothing.
GOOD = """
amazed amazing amused appreciate appreciated attractive beautiful beautifully beauty best better blessed bright
brilliant calm celebrate celebrated cheerful clean comfortable confident cozy delicious elegant enjoy enjoyable
enjoyed enjoying enthusiastic excellent exceptional excited excitement exciting fabulous fascinating favorite
favourite friendly fun funny generous glad good gorgeous grateful gratitude great happier happily happiness happy
healthy helpful impressed impressive incredible inspired inspiring interesting joy joyful laughed laughing laughter
loved lovely loving lucky magical magnificent memorable nice outstanding peaceful perfect perfectly pleasant pleased
pleasure popular positive proud recommended refreshing relaxed relaxing satisfied smile smiling spectacular splendid
stunning success successful sweet talented tasty thankful thoughtful treasure treasured vibrant warm warmth welcome
welcoming wonderfully
"""
BAD = """
abandoned abuse accident afraid aggressive alone angry annoyed annoying anxiety anxious argued argument ashamed bad
badly bitter blame blamed bored boring broken complained complaint confused crash crime cruel crying damage damaged
danger dangerous dead death depressed depressing desperate destroyed died difficult dirty disappointed disappointing
disappointment disaster empty enemy exhausted expensive fail failed failing failure fear fight filthy forced
frightened frustrated frustrating frustration guilty harsh hated helpless hopeless hurt ignored injured insult
insulted killed lonely lose losing loss lost mad mess messy mistake mistakes nasty nervous noisy pain painful panic
poor problem problems refused regret ruined sad sadly sadness scared scary scream screamed screaming shame shock
shocked sick stolen stress stressed struggle struggled struggling stuck stupid suffer suffered suffering tears
threatened tired trouble unable unfair unfortunately unhappy unpleasant useless violence violent weak worried worry
worse wrongly
"""
VALENCE = dict.fromkeys(GOOD.split(), 1) | dict.fromkeys(BAD.split(), -1)

# Tokens that may come next, in pairs; words that count, too.
NEXT = [(" good", " bad"), (" nice", " sad")]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What was measured under one spec; scores are `[prompts]`.

    greedy, sampled: positive minus negative words per 100 words. preference: how much likelier the positive words of
    NEXT are than the negative ones, in nats. surprise: of the sampled texts to the plain model, in nats per token.
    strength: the mean of s·‖v‖/‖row‖ over the rows that were steered, from the receipts.
    """

    greedy: np.ndarray
    sampled: np.ndarray
    preference: np.ndarray
    surprise: np.ndarray
    strength: float
    texts: list[str]


SCORES = ("greedy", "sampled", "preference")


# --- the direction


def sentences(block: str) -> list[str]:
    """The lines of a block, each with the words that the model goes on from."""
    return [f"{line} {OPENING}" for line in block.strip().splitlines()]


def added(direction: Tensor, layer: int, strength: float) -> ms.InterventionSpec:
    return ms.add(direction, layers=[layer], strength=strength, rows=ROWS)


def differences(lm: ms.LanguageModel, layer: int) -> Tensor:
    """Of each pair, the mean row of the first text minus that of the second: `[pairs, hidden]`."""
    texts = [text for pair in PAIRS for text in pair]
    cap = lm.capture(texts, layers=[layer], rows=ROWS, dtype="float32")
    means = torch.stack([cap.sample(index)[layer].mean(0) for index in range(len(texts))])
    return means[0::2] - means[1::2]


def controls(per_pair: Tensor, count: int, seed: int = 0) -> dict[str, list[Tensor]]:
    """Directions as long as the real one: of random numbers, and of the same pairs with half of them turned round."""
    generator = torch.Generator().manual_seed(seed)
    real = per_pair.mean(0)

    def as_long(direction: Tensor) -> Tensor:
        return direction * (real.norm() / direction.norm())

    random = [as_long(torch.randn(real.shape, generator=generator)) for _ in range(count)]
    signs = torch.tensor([1.0, -1.0]).repeat(len(per_pair) // 2)
    turned = [signs[torch.randperm(len(signs), generator=generator)] for _ in range(count)]
    return {"random": random, "shuffled": [as_long((one[:, None] * per_pair).mean(0)) for one in turned]}


# --- scores


def words(text: str) -> list[str]:
    return re.findall(r"[a-zé']+", text.lower())


def sentiment(text: str) -> float:
    """Positive minus negative words, per 100 words."""
    found = words(text)
    return 100 * sum(VALENCE.get(word, 0) for word in found) / max(1, len(found))


def measure(lm: ms.LanguageModel, prompts: list[str], specs: list[Any], tokens: int, seed: int = 0) -> list[Outcome]:
    """Each spec (False: none) on each prompt. All of them share the model's batches, each steered in its own way."""
    each = [prompt for _ in specs for prompt in prompts]
    steering = [spec for spec in specs for _ in prompts]
    length = {"max_tokens": tokens, "min_tokens": tokens}  # no text ends early: one length for `surprise`
    greedy = lm.generate(each, steering=steering, progress=True, **length)
    sampled = lm.generate(each, steering=steering, temperature=0.7, top_p=0.9, seed=seed, progress=True, **length)
    plain = lm.score(each, [one.token_ids for one in sampled], steering=False)
    next_words = {word: lm.score(each, word, steering=steering).sum(1) for pair in NEXT for word in pair}
    preference = torch.stack([next_words[good] - next_words[bad] for good, bad in NEXT]).mean(0)

    outcomes: list[Outcome] = []
    for start in range(0, len(each), len(prompts)):
        mine = slice(start, start + len(prompts))
        changes = [receipt.relative for one in [*greedy[mine], *sampled[mine]] for receipt in one.steering]
        outcomes.append(
            Outcome(
                greedy=np.array([sentiment(str(one.text)) for one in greedy[mine]]),
                sampled=np.array([sentiment(str(one.text)) for one in sampled[mine]]),
                preference=preference[mine].double().numpy(),
                surprise=-plain[mine].double().mean(1).numpy(),
                strength=float(np.mean(changes)) if changes else 0.0,
                texts=[str(one.text) for one in sampled[mine]],
            )
        )
    return outcomes


def mean_of(outcomes: list[Outcome]) -> Outcome:
    """Each prompt's scores averaged over several directions of one kind; the texts are the first one's."""
    means = {name: np.mean([getattr(one, name) for one in outcomes], axis=0) for name in (*SCORES, "surprise")}
    strength = float(np.mean([one.strength for one in outcomes]))
    return Outcome(**means, strength=strength, texts=outcomes[0].texts)


def interval(values: np.ndarray, draws: int = 5000) -> str:
    """The mean over prompts, and its 95 % bootstrap interval: prompts drawn again, with replacement."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (draws, len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{values.mean():+.2f} [{low:+.2f}, {high:+.2f}]"


# --- what is run


def tune(lm: ms.LanguageModel, tokens: int) -> None:
    """The sweep from which layer and strength were chosen."""
    prompts = sentences(TUNING)
    plain = measure(lm, prompts, [False], tokens, seed=1)[0].surprise.mean()
    print("                   s·‖v‖/   + minus −                            surprise over the plain model's")
    print("layer  strength     ‖row‖    greedy   sampled  preference        +       −")
    for layer in range(5, lm.facts.num_layers - 5, 3):
        direction = differences(lm, layer).mean(0)
        strengths = [1.0, 1.5, 2.0, 3.0]
        specs = [added(direction, layer, sign * strength) for strength in strengths for sign in (1, -1)]
        found = measure(lm, prompts, specs, tokens, seed=1)
        for strength, plus, minus in zip(strengths, found[0::2], found[1::2], strict=True):
            gaps = [(getattr(plus, name) - getattr(minus, name)).mean() for name in SCORES]
            extra = [one.surprise.mean() - plain for one in (plus, minus)]
            print(
                f"{layer:5d}{strength:10.1f}{plus.strength:10.2f}{gaps[0]:10.2f}{gaps[1]:10.2f}{gaps[2]:12.2f}"
                f"{extra[0]:+9.2f}{extra[1]:+8.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Steer the sentiment of texts, and measure it.")
    parser.add_argument("--model", default="smollm2", help="a folder, a hub id, or smollm2 (bundled)")
    parser.add_argument("--layer", type=int, default=LAYER, help=f"the block (default: {LAYER}, chosen with --tune)")
    parser.add_argument("--strength", type=float, default=STRENGTH, help=f"s in x + s·v (default: {STRENGTH})")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="the folder to write to (default: demo)")
    parser.add_argument("--small", action="store_true", help="fewer prompts, shorter texts, for a quick look")
    parser.add_argument("--tune", action="store_true", help="print the sweep of layers and strengths, on other prompts")
    given = parser.parse_args()
    count, tokens, each = (6, 10, 1) if given.small else (50, 24, 3)

    with ms.load(given.model, dtype="float32") as lm:
        if given.tune:
            tune(lm, tokens)
            return
        prompts = sentences(PROMPTS)[:count]
        per_pair = differences(lm, given.layer)
        direction = per_pair.mean(0)
        specs: dict[str, list[Any]] = {
            "plain": [False],
            "+": [added(direction, given.layer, given.strength)],
            "−": [added(direction, given.layer, -given.strength)],
        }
        for kind, directions in controls(per_pair, each).items():
            specs[kind] = [added(other, given.layer, given.strength) for other in directions]
        found = iter(measure(lm, prompts, [spec for group in specs.values() for spec in group], tokens))
        outcomes = {name: [next(found) for _ in group] for name, group in specs.items()}
        facts = lm.facts

    conditions = {name: mean_of(group) for name, group in outcomes.items()}
    plain = conditions["plain"]
    print(f"{count} prompts, {tokens} tokens each, layer {given.layer}; mean over prompts [95 % bootstrap interval]\n")
    print(f"{'':18}{'words, greedy':>25}{'words, sampled':>25}{'preference, nats':>25}{'surprise':>10}{'strength':>10}")
    for name, one in conditions.items():
        cells = "".join(f"{interval(getattr(one, score)):>25}" for score in SCORES)
        print(f"{name:18}{cells}{one.surprise.mean():10.2f}{one.strength:10.3f}")

    print("\nminus the plain model's, prompt by prompt")
    changes: dict[str, list[str]] = {}
    for name in list(conditions)[1:]:
        each_one = {score: [getattr(one, score) - getattr(plain, score) for one in outcomes[name]] for score in SCORES}
        changes[name] = [interval(np.mean(values, axis=0)) for values in each_one.values()]
        if len(outcomes[name]) > 1:  # the directions may cancel in the mean
            largest = [max(values, key=lambda change: abs(change.mean())) for values in each_one.values()]
            changes[f"{name}, largest"] = list(map(interval, largest))
    for name, texts in changes.items():
        print(f"{name:18}" + "".join(f"{text:>25}" for text in texts))
    print(f"\n{prompts[0]!r} goes on, sampled:")
    for name, one in conditions.items():
        print(f"  {name:10}{one.texts[0]!r}")

    given.out.mkdir(parents=True, exist_ok=True)
    provenance = {
        "method": "mean over pairs of: mean row of the positive text minus mean row of the negative one",
        "model": given.model,
        "model_type": facts.model_type,
        "fingerprint": facts.model_fingerprint,
        "rows": ROWS,
        "pairs": [list(pair) for pair in PAIRS],
        "quality": {
            "strength": given.strength,
            "prompts": count,
            "tokens": tokens,
            "scores": list(SCORES),
            "change": changes,
        },
    }
    path = write_vectors(given.out / "sentiment.safetensors", {given.layer: direction}, provenance)
    samples = {name: dict(zip(prompts, one.texts, strict=True)) for name, one in conditions.items()}
    (given.out / "steer_sentiment.json").write_text(json.dumps(samples, ensure_ascii=False, indent=1), encoding="utf-8")
    print(f"\nwrote {path} (use it: ms.add({str(path)!r}, strength={given.strength})) and steer_sentiment.json")


if __name__ == "__main__":
    main()
