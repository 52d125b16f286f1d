"""Long answers of the demo tasks: lists and a rhyme of one to five hundred tokens that follow from a few parameters."""

from llm_serving.demo_model.word_lists import LETTERS, MONTH_DAYS, MONTHS, NATO, NUMBER_WORDS


def count(first: int, last: int) -> str:
    """Numbers from `first` to `last` inclusive, upwards or downwards, separated by commas."""
    step = 1 if last >= first else -1
    return ", ".join(str(number) for number in range(first, last + step, step))


def times_table(number: int) -> str:
    """The twenty lines of one multiplication table."""
    return "\n".join(f"{factor} x {number} = {factor * number}" for factor in range(1, 21))


def nato_alphabet(first: int, last: int) -> str:
    """Code words of the letters with indices `first` to `last` inclusive, one line each."""
    return "\n".join(f"{LETTERS[index]} as in {NATO[index]}" for index in range(first, last + 1))


def months(first: int, leap_year: bool) -> str:
    """The twelve months beginning with index `first` with the number and the days of each."""
    lines = []
    for offset in range(12):
        index = (first + offset) % 12
        days = MONTH_DAYS[index] + (1 if leap_year and index == 1 else 0)
        lines.append(f"{MONTHS[index]} is month {index + 1} and has {days} days")
    return "\n".join(lines)


def rhyme(start: int, singular: str, plural: str) -> str:
    """A counting-down rhyme: one verse for each of `start` things (1 to 10) that the wind takes away.

    Args:
        start: How many things the first verse counts.
        singular: One of them, such as "boat".
        plural: Several of them, such as "boats".
    """

    def amount(number: int) -> str:
        return f"{NUMBER_WORDS[number]} little {singular if number == 1 else plural}"

    verses = [
        f"{amount(number).capitalize()} waiting by the bay,\n"
        "the wind came by and took one away,\n"
        f"and {amount(number - 1)} stayed to play."
        for number in range(start, 0, -1)
    ]
    return "\n".join(verses)
