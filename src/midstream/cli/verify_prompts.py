"""What `midstream verify` reads when it is given no prompts: about a thousand tokens of several kinds."""

from __future__ import annotations

from typing import Final

TEXTS: Final = (
    "Yes",
    "The capital of France is",
    "¿Por qué el cielo es azul?",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89,",
    """\
import bisect


class Ledger:
    \"\"\"Entries in order of time; a balance at any time is one search away.\"\"\"

    def __init__(self, entries=()):
        self.times, self.sums = [], []
        for time, amount in sorted(entries):
            self.add(time, amount)

    def add(self, time, amount):
        if self.times and time < self.times[-1]:
            raise ValueError(f"{time} is before {self.times[-1]}")
        self.times.append(time)
        self.sums.append((self.sums[-1] if self.sums else 0) + amount)

    def balance(self, time):
        place = bisect.bisect_right(self.times, time)
        return self.sums[place - 1] if place else 0


ledger = Ledger([(1, 100), (3, -20), (7, 55)])
assert ledger.balance(0) == 0
assert ledger.balance(3) == 80
print([ledger.balance(day) for day in range(""",
    """\
Water boils at a hundred degrees and freezes at zero, and between the two it is a liquid that takes the shape of
whatever holds it. It runs downhill, and carries away a little of every stone that it meets on its way; given time
enough it will cut a valley, and what it took from the hills it lays down again where the river meets the sea. The
ancient geographers, who saw the mud of the Nile but never the mountains from which it came, thought that the land
itself was growing. They were right, in a way. Each year the flood brought a new layer, thin as a fingernail, and in
four thousand years the temples along the banks had sunk to their knees. Nobody in any one lifetime could have seen it
happen. What changes slowly looks as if it did not change at all, and we give it a name as though it would stay: a
river, a language, a coast. Then somebody digs, and finds under the floor of the house another floor, and under that
one ashes, and under the ashes shells of a kind that live only in salt water. Such a""",
    """\
{"orders": [
  {"id": 1041, "customer": "Åsa Lindqvist", "items": [{"sku": "BK-220", "count": 2, "price": 14.50}], "paid": true},
  {"id": 1042, "customer": "José Álvarez", "items": [{"sku": "TL-007", "count": 1, "price": 129.00},
    {"sku": "BK-113", "count": 12, "price": 3.25}], "paid": false},
  {"id": 1043, "customer": "M. O'Neill", "items": [], "paid": null, "note": "cancelled on 2021-03-04 at 17:45"},
  {"id": 1044, "customer": "Zoë van Dijk", "items": [{"sku": "XQ-900", "count": 1, "price": 0.99}], "paid": true},
  {"id": 1045, "customer": """,
    """\
Question: A train leaves the harbour at nine in the morning and travels at sixty kilometres an hour. A second train
leaves the same station half an hour later and travels at eighty. When does the second one overtake the first?

Answer: By the time the second train leaves, the first has gone thirty kilometres. The second gains twenty kilometres
on it in each hour, so it needs an hour and a half, and overtakes it at eleven o'clock, a hundred and twenty kilometres
from the harbour.

Question: Anna is twice as old as Ben was when Anna was as old as Ben is now. Together they are forty-nine. How old are
they?

Answer: Let""",
)
