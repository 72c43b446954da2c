#!/usr/bin/env python3
"""Writes the task of the README's run on a real pretrained model (SmolLM2-135M-Instruct): sums of two small numbers.

    python tests/make_sums.py FOLDER        # FOLDER/train.jsonl (840 problems) and FOLDER/test.jsonl (60 others)

Each prompt is a list of chat turns with one worked example, without which that model hardly ever boxes an answer.
"""

import json
import random
import sys
from pathlib import Path

rows = [{"prompt": [{"role": "user", "content": "What is 12 + 9?"},
                    {"role": "assistant", "content": "12 + 9 = \\boxed{21}"},
                    {"role": "user", "content": f"What is {a} + {b}?"}], "answer": a + b}
        for a in range(1, 31) for b in range(1, 31)]
random.Random(0).shuffle(rows)
folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name, part in (("train", rows[60:]), ("test", rows[:60])):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
