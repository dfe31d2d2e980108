"""Writes the data of the two tasks: `python make_data.py`. Held-out rows have their own nouns and statements."""

import csv
import random

NOUNS = """
apple anchor basket bicycle blanket bottle bridge broom bucket butter button cabin camera candle carpet castle
chair cheese clock cloud coat coffee compass curtain desert doctor drum engine farmer feather fence field flute
forest fountain garden glove guitar hammer harbour helmet honey horse island jacket kettle kitchen ladder lake
lamp lemon letter lion market medal mirror monkey moon mountain needle ocean orange oven painter paper pencil
piano pillow pirate pocket potato queen rabbit radio rain river road rocket roof rope saddle sailor salt school
shadow ship silver snow soldier spoon squirrel station stone storm sugar sunset sword teacher tent tiger towel
tower train umbrella valley violin wagon wallet whale wheel wind window winter wolf
"""
HELD_OUT_NOUNS = 30

GOOD = """
The soup was hot and full of flavour. The waiter was friendly and quick. We got a free dessert. Every dish
looked and tasted wonderful. The bread was still warm. I have never eaten better fish. The room was clean and
quiet. We slept like babies. The staff helped us with everything. The view over the bay is stunning. Breakfast
was a real treat. The bed was huge and soft. I laughed from start to finish. The actors are superb. The ending
brought me to tears of joy. I want to see it again tomorrow. The music is beautiful. The story kept me on the
edge of my seat. The battery lasts for days. It works perfectly. Setting it up took a minute. The screen is
sharp and bright. It is worth every cent. My kids adore it. It arrived a day early. The sound is rich and clear.
I would buy it again. It makes my mornings so much easier. The garden was lovely. Our guide was charming and
knew everything. The pool was spotless. They fixed my problem at once. The tickets were a bargain. I came home
happy and relaxed. The cake was delicious. The seats were comfortable.
"""
BAD = """
The soup was cold and bland. The waiter was rude and slow. We waited an hour for a table. Half of the dishes
were burnt. The bread was stale. I felt sick after the fish. The room smelled of smoke. We could not sleep
because of the noise. The staff ignored us. The window faced a wall. Breakfast was a joke. The bed was hard and
too short. I left the cinema after an hour. The actors seem bored. The ending makes no sense. I want my money
back. The music gave me a headache. The story drags on forever. The battery dies within an hour. It broke after
two days. I never got it to work. The screen is dark and blurry. It is a waste of money. My kids hate it. It
arrived three weeks late. The sound is awful. I sent it back. It makes a terrible noise. The garden was full of
rubbish. Our guide was grumpy and knew nothing. The pool was dirty. Nobody answered my calls. The tickets cost a
fortune. I came home tired and angry. The cake was dry. The seats were broken.
"""
HELD_OUT_STATEMENTS = 10
ROWS, HELD_OUT_ROWS = 400, 160


def word_rows(rng: random.Random, nouns: list[str], count: int) -> list[dict[str, str]]:
    pairs = [rng.sample(nouns, 2) for _ in range(count)]
    query = 'Write one short sentence with the words "{}" and "{}".'
    return [{"query": query.format(*pair), "first": pair[0], "second": pair[1]} for pair in pairs]


def review_rows(rng: random.Random, good: list[str], bad: list[str], count: int) -> list[dict[str, str]]:
    rows = []
    for _ in range(count):
        label, statements = rng.choice([("positive", good), ("negative", bad)])
        rows.append({"query": " ".join(f"{text}." for text in rng.sample(statements, 2)), "label": label})
    return rows


def unique(rows: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    return list({row["query"]: row for row in rows}.values())[:count]


def write(path: str, rows: list[dict[str, str]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    rng = random.Random(0)
    good, bad = ([text.strip() for text in " ".join(texts.split()).split(".")[:-1]] for texts in (GOOD, BAD))
    nouns, good, bad = (rng.sample(texts, len(texts)) for texts in (NOUNS.split(), good, bad))
    n, s = HELD_OUT_NOUNS, HELD_OUT_STATEMENTS
    write("words.csv", unique(word_rows(rng, nouns[n:], 2 * ROWS), ROWS))
    write("words_test.csv", unique(word_rows(rng, nouns[:n], 2 * HELD_OUT_ROWS), HELD_OUT_ROWS))
    write("reviews.csv", unique(review_rows(rng, good[s:], bad[s:], 2 * ROWS), ROWS))
    write("reviews_test.csv", unique(review_rows(rng, good[:s], bad[:s], 8 * HELD_OUT_ROWS), HELD_OUT_ROWS))


if __name__ == "__main__":
    main()
