"""Compares the two readers of answers: that of the task gsm8k, and math-verify, that of the task math.

python -m benchmarks.answers gsm8k/train.jsonl gsm8k/test.jsonl
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cory_env.rewards.answer import last_is_right
from cory_env.rewards.mathematics import same_value

HARD: list[tuple[str, str, bool]] = [
    *((text, "1/2", True) for text in ("0.5", r"$\frac{1}{2}$")),
    ("The answer is 1/2.", "0.5", True),
    (r"\boxed{\frac{3}{4}}", "0.75", True),
    (r"\frac34", "3/4", True),
    *((text, "1000", True) for text in ("1,000", "It costs $1,000.", "1 000", "10^3")),
    *((text, "50", True) for text in ("50%", r"50\%")),
    ("50%", "0.5", True),
    *((text, "12", True) for text in ("12 apples", "€12", "12 €", "12%")),
    *(
        (text, "18", True)
        for text in ("18 dollars.", r"$\boxed{18}$", "The answer is 18.", "18.", "18.00", "**18**", "18\n")
    ),
    *((text, "-3", True) for text in ("-3", "minus: −3", r"\boxed{-3}")),
    *((text, "2500", True) for text in ("2.5e3", r"2.5 \times 10^3")),
    ("1e-3", "0.001", True),
    *((text, "2", True) for text in ("5-3 = 2", r"\sqrt{4}", "$18$ eggs and $2$ per egg")),
    ("2 or 3", "2", False),
    ("The answer is 7, not 8", "8", False),
    *((text, "5", True) for text in ("x = 5", "5 km/h", "Step 1: 4. Step 2: 5. #### 5")),
    *((text, "5", False) for text in ("No number", "", "1/0")),
    ("0.333", "1/3", False),
    *((text, "1.5", True) for text in ("1 1/2", r"1\frac{1}{2}")),
    ("2*3", "6", True),
    ("3:30", "3.5", False),
    ("-$5", "-5", True),
    *((text, "7", True) for text in ("The total is 3+4=7", "7 (seven)")),
    ("18 minutes and 5 seconds later it is 9", "9", True),
]
"""What a model may write, the right answer, and whether it is right."""


def main() -> None:
    """Prints what each reader makes of the solutions in the files that are named, and of the hard cases."""
    rows = [json.loads(line) for name in sys.argv[1:] for line in Path(name).read_text(encoding="utf-8").splitlines()]
    solutions = [row["answer"] for row in rows]
    numbers = [solution.rpartition("#### ")[2] for solution in solutions]
    readers: dict[str, Callable[[Sequence[str], Sequence[object]], list[float]]] = {
        "gsm8k": last_is_right,
        "math": same_value,
    }
    for name, reader in readers.items():
        print(f"{name}:")
        if rows:
            started = time.perf_counter()
            print(f"  own solution right        {sum(reader(solutions, solutions)):.0f} of {len(rows)}")
            print(f"  milliseconds each         {(time.perf_counter() - started) / len(rows) * 1000:.2f}")
            for label, form in (("in a sentence", "The answer is {}."), ("in a box", r"\boxed{{{}}}")):
                accepted = reader([form.format(number) for number in numbers], solutions)
                print(f"  {label:<25} {sum(accepted):.0f}")
            moved, plain = solutions[1:] + solutions[:1], [number.replace(",", "") for number in numbers]
            other = [a != b for a, b in zip(plain, plain[1:] + plain[:1], strict=True)]
            wrong = sum(bool(value) and unlike for value, unlike in zip(reader(moved, solutions), other, strict=True))
            print(f"  the next one's taken      {wrong}")
        texts, golds, _ = zip(*HARD, strict=True)
        misses = [case for case, value in zip(HARD, reader(texts, golds), strict=True) if bool(value) is not case[2]]
        print(f"  hard cases                {len(HARD) - len(misses)} of {len(HARD)}")
        for text, gold, is_right in misses:
            print(f"    {text!r} for {gold}: {'refused' if is_right else 'taken'}")


if __name__ == "__main__":
    main()
