r"""What the verifier pays and what it does not, one table for each kind, then the worker that does the algebra.

B("5") is a response that boxes 5. A line reads: response, gold, wanted reward.
"""
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import reward as verifier
from reward import extract_answer, grade, read_gold, reward

ROOT = Path(verifier.__file__).parent


def B(answer):
    return rf"Hence the value is $\boxed{{{answer}}}$."


def why(response, gold):
    return grade([response], [gold])[0][1]


BOXES = [
    (B("17"), "17", 1), (B("18"), "17", 0),
    (r"\boxed{\frac{3}{8}}", r"\frac{3}{8}", 1),  # braces inside braces
    (r"\boxed {9}", "9", 1), ("\\boxed{\n9\n}", "9", 1), (r"\fbox{9}", "9", 1), (r"\boxed{\boxed{9}}", "9", 1),
    (r"\boxed{8}, no, I lost a sign. \boxed{9}", "9", 1), (r"\boxed{8}, no, I lost a sign. \boxed{9}", "8", 0),
    ("\\boxed{60}\n\nFinal answer:\n\\boxed{60}", "60", 1), (r"\boxed{60}, \boxed{60}", "60", 1),
    (r"\boxed{2} and \boxed{-2}", "2, -2", 1), (r"$\boxed{2}$, $\boxed{-2}$", "-2, 2", 1),
    (r"\boxed{2} or \boxed{-2}", "-2", 0), (r"$x=\boxed{2}$ or $x=\boxed{-2}$", "-2", 0),
    (r"\boxed{6} fits the form \boxed{}", "6", 1), (r"\boxed{6} fits the form \boxed{...}", "6", 1),
    (r"\boxed{6", "6", 0), (r"\boxed{\sqrt{6}", r"\sqrt{6}", 0), (r"\boxed{6}, or to be exact \boxed{6", "6", 0),
    ("\\boxed{6 oops.\nAgain: \\boxed{7}", "7", 1), (r"\boxed{6 + \boxed{7}", "7", 0),
    ("The answer is 6.", "6", 0), ("**6**", "6", 0), ("Put the answer in a box: \\boxed{}. It is 6.", "6", 0),
    ("", "6", 0), (None, "6", 0), (6, "6", 0), (b"\\boxed{6}", "6", 0),
    ("所以答案是 \\(\\boxed{6}\\)。", "6", 1),
    (r"<think>maybe \boxed{1}</think> \boxed{6}", "6", 1), (r"<think>maybe \boxed{6}</think> \boxed{1}", "6", 0),
    (r"<think>\boxed{6}</think> I give up.", "6", 0), (r"<think>\boxed{6}", "6", 0),
    (r"so far</think> \boxed{6}", "6", 1), (r"</think> \boxed{6} <think> or rather", "6", 0),
]

GOLDS = [
    (B(r"\frac37"), r"$\frac{3}{7}$", 1), (B(r"\frac37"), r"\dfrac{3}{7}", 1),
    (B("96"), "8*12=<<8*12=96>>96\n#### 96", 1),
    (B("12500"), "#### 12,500", 1), (B("3"), 3, 1), (B("3"), 3.0, 1), (B("3"), ["3"], 1),
    (B(r"\frac{3"), r"\frac{3", 0), (B(r"\frac{3}{7}"), r"\frac{3", 0), (B("2"), r"\sqrt{2", 0),
    (B(r"\frac{3}"), r"\frac{3}", 0),
    (B("None"), None, 0), (B(""), "", 0), (B("nan"), float("nan"), 0), (B("1, 2"), ["1", "2"], 0), (B("True"), True, 0),
    (B("2"), r"2\pi", 0), (B(r"\pi"), r"2\pi", 0), (B("3"), r"\sqrt{3}", 0), (B(r"\frac{3}{4}"), r"20 \frac{3}{4}", 0),
]

NUMBERS = [
    (B("61,250"), "61250", 1), (B("1,061,250"), "1061250", 1), (B("4,321"), "4321", 1), (B("4321"), r"4,\!321", 1),
    (B("4{,}321"), "4321", 1), (B("4, 321"), "4321", 0), (B("2 3"), "23", 0), (B("8.0"), "8", 1), (B("008"), "8", 1),
    (B("+8"), "8", 1), (B("8."), "8", 1), (B("−8"), "-8", 1), (B("８"), "8", 1), (B("80"), "8", 0),
    (B(r"4\frac{1}{4}"), "4.25", 1), (B(r"\frac{17}{4}"), r"4 \frac14", 1), (B("-4 1/4"), "-4.25", 1),
    (B(r"\frac{-1}{4}"), r"-\frac14", 1), (B("1/4"), r"\tfrac14", 1), (B("2/8"), "1/4", 1), (B("1/0"), "5", 0),
    (B(r"7.2 \times 10^{18}"), "7.2e18", 1), (B(r"10^{-3}"), "0.001", 1), (B("7.2e18"), r"7.3 \cdot 10^{18}", 0),
    (B("75"), r"75\%", 1), (B(r"75\%"), "75", 1), (B("0.75"), r"75\%", 1), (B(r"75\%"), "0.75", 1),
    (B("7.5"), r"75\%", 0),
    (B("2.7183"), "2.71828", 1), (B("2.72"), "2.71828", 0), (B("0.6667"), r"\frac23", 0), (B("41.9999"), "42", 0),
    (B("2.6458"), r"\sqrt{7}", 0), (B(r"\sqrt{7}"), "2.64575", 1), (B(r"\sqrt{7}"), "2.6", 0),
    (B("300000000000000001"), "300000000000000000", 0), (B("300000000000000000"), "300000000000000000", 1),
    (B("1 061"), "1061", 0), (B("10,61"), "1061", 0), (B("-0"), "0", 1), (B("45e32"), "4.5E33", 1),
    (B("1e9999999"), "5", 0),
    (B("3.2101"), "3.21", 1), (B("3.22"), "3.21", 0), (B("8.0001"), "8.0", 0), (B(r"0.75\%"), "75", 0),
    (B(r"\frac34"), r"75\%", 1),
    (B(r"3\frac14"), r"20 \frac14", 0), (B("5"), r"20 \frac14", 0), (B("20.25"), r"20 \frac14", 1),
    (B("81/4"), r"20\frac{1}{4}", 1),
]

HEDGES = [
    (B("1, 2, 3, 4, 5"), "4", 0), (B("4 or 5"), "4", 0), (B(r"4 \text{ or } 5"), "5", 0), (B("4; 5"), "4", 0),
    (B(r"4 \text{ (or 5)}"), "4", 0), (B("4 (5)"), "4", 0), (B(r"4 \text{ or five}"), "4", 0), (B(r"\pm 4"), "4", 0),
    (B(r"4 \text{ perhaps fifteen}"), "4", 0), (B(r"4 \text{ or } 5"), "5, 4", 1), (B("x = 3 = 4"), "4", 0),
    (B("x = 4 = 3"), "4", 0), (B(r"x = \frac{8}{2} = 4"), "4", 1), (B("A or C"), "A", 0), (B(r"4 \text{或} 5"), "4", 0),
    (B(r"4\quad 5"), "4", 0), (B(r"4 \neq 5"), "4", 0), (B("4 vs 5"), "4", 0), (B(r"\text{east or west}"), "east", 0),
    (B(r"4 \lor 5"), "4", 0), (B(r"4 \to 5"), "4", 0), (B(r"4 \Rightarrow 5"), "5", 0), (B("4|5"), "4", 0),
    (B("4~5"), "4", 0),
    (B(r"4 \text{ 5}"), "4", 0), (B(r"4 \text{, maybe 5}"), "4", 0), (B(r"4 \approx 5"), "4", 0),
    (B(r"4 \\ 5"), "4", 0),
    (B(r"x \in \{4, 5\}"), "4", 0), (B(r"x = 4 \text{ or } x = 5"), "5, 4", 1), (B(r"x = 4,\ y = 5"), "4", 0),
    (B(r"4 \text{thirty-five}"), "4", 0), (B(r"\{4\} \cup \{5\}"), "4", 0),
    (B(r"4, \ldots"), "4", 0),
    (B(r"\pm 0"), "0", 0), (B("x > 4"), "4", 0), (B(r"x \ne 4"), "4", 0), (B("4\n5"), "4", 0), (B("(D) 4"), "4", 0),
]

SHAPES = [
    (B("(4, -7)"), "(4,-7)", 1), (B("(-7, 4)"), "(4,-7)", 0), (B("(8,-7)"), "(4,-7)", 0), (B("4, -7"), "(4,-7)", 1),
    (B("-7, 4"), "4, -7", 1), (B(r"\{-7, 4\}"), r"\{4, -7\}", 1), (B(r"\{4\}"), "4", 1), (B("4, 4"), "4, -7", 0),
    (B("4, -7"), "4, 4", 0),
    (B("[1,4)"), "[1,4)", 1), (B("[1,4]"), "[1,4)", 0), (B(r"(-\infty, 4]"), r"(-\infty,4]", 1),
    (B(r"[1,4]"), r"x \in [1,4]", 1), (B(r"1 \le x \le 4"), "[1,4]", 1), (B("1 < x < 4"), "[1,4]", 0),
    (B(r"(3,4) \cup (1,2)"), r"(1,2) \cup (3,4)", 1), (B("(1,2)"), r"(1,2) \cup (3,4)", 0),
    (B(r"2+\sqrt{3}, 2-\sqrt{3}"), r"2 \pm \sqrt{3}", 1), (B(r"2+\sqrt{3}"), r"2 \pm \sqrt{3}", 0),
    (B(r"\begin{bmatrix} \frac12 \\ -3 \end{bmatrix}"), r"\begin{pmatrix} 1/2 \\ -3 \end{pmatrix}", 1),
    (B(r"\begin{pmatrix} 1/2 & -3 \end{pmatrix}"), r"\begin{pmatrix} 1/2 \\ -3 \end{pmatrix}", 0),
    (B("-3"), r"\begin{pmatrix} 1/2 \\ -3 \end{pmatrix}", 0), (B("10,000, 20,000"), "10000, 20000", 1),
    (B("(0.5, 2)"), r"\left(\frac12, 2\right)", 1), (B(r"\{\sqrt{8}, 1\}"), r"1, 2\sqrt{2}", 1),
]

NAMES_UNITS_WORDS = [
    (B("n = 31"), "31", 1), (B("31"), "n = 31", 1), (B("31 = n"), "n = 31", 1), (B("m = 31"), "n = 31", 0),
    (B(r"\text{Area} = 31"), "31", 1), (B("(a,b) = (1,2)"), "(1,2)", 1), (B("3n - 1"), "f(n) = 3n-1", 1),
    (B("3n = 31"), "31", 0),
    (B("4x+6y-2=0"), "2x + 3y - 1 = 0", 1), (B("4x+6y-1=0"), "2x + 3y - 1 = 0", 0),
    (B(r"31 \text{ m}^2"), "31", 1), (B(r"31\,\mathrm{cm}"), "31", 1), (B("31 cm^2"), "31", 1),
    (B("31"), r"31 \mbox{ cm}^2", 1),
    (B("60°"), "60", 1), (B("60"), r"60^{\circ}", 1), (B(r"\$4.50"), "4.5", 1), (B(r"6\pi\text{ cm}"), r"6\pi", 1),
    (B(r"31 \text{ apples}"), "31", 1), (B(r"31 \text{ million}"), "31", 0), (B("31x"), "31", 0),
    (B("110_3"), "110", 0), (B("110"), "110_3", 0), (B("12"), "110_3", 0), (B("110_{3}"), "110_3", 1),
    (B("110_4"), "110_3", 0),
    (B("d"), r"\text{(D)}", 1), (B(r"\textbf{(D)}"), "D", 1), (B("C"), "D", 0), (B(r"\text{north}"), "North", 1),
    (B("thorn"), "north", 0), (B("no"), r"\text{yes}", 0),
    (B(r"31\mathrm{i}"), "31", 0), (B(r"31 \text{x}"), "31", 0), (B(r"31 \text{ dozen}"), "31", 0),
    (B("31 pi"), "31", 0),
    (B(r"31 \text{ miles per hour}"), "31", 1), (B(r"31\ \text{m/s}"), "31", 1),
    (B(r"31 \text{ square units}"), "31", 1),
    (B(r"9{:}30 \text{ a.m.}"), r"9{:}30 \text{ p.m.}", 0), (B("y-3x=2"), "y = 3x+2", 1), (B("y-3x=1"), "y = 3x+2", 0),
    (B(r"110_{\text{three}}"), "110", 0), (B("(110)_3"), "110_3", 1), (B("D, A"), "D", 0),
    (B(r"\mathrm{(D)}"), "(D)", 1),
    (B(r"\text{stop}"), r"\text{post}", 0), (B("NORTH"), r"\text{north}", 1),
]

ALGEBRA = [
    (B(r"\sqrt{12}"), r"2\sqrt3", 1), (B(r"\frac{2}{\sqrt2}"), r"\sqrt{2}", 1), (B(r"\sqrt{2}"), r"\sqrt{3}", 0),
    (B("(n+1)^2"), "n^2+2n+1", 1), (B("(n+1)^2"), "n^2+1", 0), (B("b-a"), "a - b", 0), (B("-b+a"), "a - b", 1),
    (B("3i+2"), "2+3i", 1), (B("2-3i"), "2+3i", 0), (B("6!"), "720", 1), (B("2^{12}"), "4096", 1),
    (B("0.5n"), r"\frac n2", 1),
    (B(r"\foo{3}"), "3", 0), (B("3 +"), "3", 0),
]


ALL = BOXES + GOLDS + NUMBERS + HEDGES + SHAPES + NAMES_UNITS_WORDS + ALGEBRA


@pytest.mark.parametrize("response, gold, want", ALL)
def test_pays_what_the_policy_says(response, gold, want):
    assert reward(response, gold) == want


@pytest.mark.parametrize("response, gold, reason", [
    (B("3"), "3", "right"), (B("4"), "3", "wrong"), (B("x+4"), "3", "wrong"), ("3", "3", "no box"),
    (r"\boxed{3", "3", "no box"),
    (r"\boxed{}", "3", "no box"), (r"<think>\boxed{3}", "3", "unclosed think"), (B(r"\frac{x}+"), "3", "unreadable"),
    (B("9" * 5000), "3", "unreadable"), (B("3"), r"\frac{3", "unreadable"), (B("8^{8^{8^{8}}}"), "3", "unreadable"),
])
def test_says_why(response, gold, reason):
    assert why(response, gold) == reason


def test_extract_answer_returns_the_deciding_box():
    assert extract_answer(r"\boxed{1} then \boxed{ \frac{2}{3} }") == r"\frac{2}{3}"
    assert extract_answer(r"\boxed{1}, \boxed{2} and \boxed{3}") == "1, 2, 3"
    assert extract_answer(r"\boxed{1} then \boxed{2") is None and extract_answer(None) is None


@pytest.mark.parametrize("answer, gold", [
    (25, "25"), ("27.0", "27.0"), (27.0, "27"), (0.125, "0.125"), (" 7 ", "7"), ("so 5+2\n#### 7", "7"),
    (r"$\frac12$", r"\frac12"),
    (r"\$5", r"\$5"), ("6.02e23", "6.02e23"), (["7"], "7"), (r"Thus \boxed{\sqrt{7}}.", r"\sqrt{7}"),
    ("(3,4]", "(3,4]"),
    ("9007199254740993", "9007199254740993"), ("2^{64}", "2^{64}"), ("1e20", "1e20"), (r"\sqrt[3]{2}", r"\sqrt[3]{2}"),
])
def test_read_gold_accepts(answer, gold):
    assert read_gold(answer) == gold


EMPTY, UNREADABLE, ROUNDED = "empty answer", "unreadable answer", "answer above 2^53 that went through a float"


@pytest.mark.parametrize("answer, reason", [
    (None, EMPTY), ("", EMPTY), ("  ", EMPTY), ("####", EMPTY), (float("nan"), EMPTY), ("$$", EMPTY), ("None", EMPTY),
    (r"\frac{1", UNREADABLE), (r"\frac{1}", UNREADABLE), (r"\sqrt", UNREADABLE), ("3 +", UNREADABLE),
    ("(3,4", UNREADABLE),
    (r"\begin{pmatrix} 1", UNREADABLE), (["1", "2"], UNREADABLE), ({"a": 1}, UNREADABLE), (True, UNREADABLE),
    (b"1", UNREADABLE),
    ("(" * 500 + "5" + ")" * 500, UNREADABLE), ("1" * 5000, UNREADABLE),
    (str(int(float(123456789012345678901))), ROUNDED), (2 ** 60, ROUNDED), (1.5e19, ROUNDED), ("-1.5e19", None),
    ("30000000000000000000000", ROUNDED), ("30000000000000000000000.0", ROUNDED), ("1.2345678901234567e+19", ROUNDED),
    ("30,000,000,000,000,000,000,000", None), ("30000000000000000000001", None),
])
def test_read_gold_refuses(answer, reason):
    """The reasons hold nothing of the row, so that a loader can count equal ones. None: fine."""
    try:
        read_gold(answer)
        assert reason is None
    except ValueError as error:
        assert str(error) == reason


# --------------------------------------------------------------------------------------------------------- the worker

def test_import_is_light():
    """The training process must not load sympy, nor start anything, by importing the verifier."""
    code = "import sys, reward; print('sympy' in sys.modules, 'math_verify' in sys.modules, reward._worker.process)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert shown.split() == ["False", "False", "None"]


def test_plain_numbers_need_no_worker_and_are_fast(monkeypatch):
    monkeypatch.setattr(verifier, "_ask_worker", None)  # calling it would fail, and earn 0
    begin = time.perf_counter()
    verdicts = grade([B(f"\N{MINUS SIGN}{n:,}") for n in range(500, 1500)], [str(-n) for n in range(500, 1500)])
    assert all(verdict == (1.0, "right") for verdict in verdicts)
    assert time.perf_counter() - begin < 1


def test_survives_the_death_of_its_worker():
    verifier.start()
    os.kill(verifier._worker.process.pid, signal.SIGKILL)
    assert reward(B(r"\sqrt{20}"), r"2\sqrt{5}") == 1
    verifier.stop()
    assert reward(B(r"\sqrt{28}"), r"2\sqrt{7}") == 1


def test_works_from_many_threads():
    """Pairs no other test has cached; answers must not be swapped between threads."""
    got = {}

    def work(n):
        got[n] = reward(B(rf"\sqrt{{{n * n * 11}}}"), rf"{n}\sqrt{{{11 + n % 2}}}")  # right for even n

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {n: 1 - n % 2 for n in range(2, 10)}


def test_a_forked_process_gets_a_worker_of_its_own():
    verifier.start()
    ours = verifier._worker.process.pid

    def in_child(pipe):
        pipe.send((reward(B(r"\sqrt{68}"), r"2\sqrt{17}"), verifier._worker.process.pid))
        verifier.stop()

    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=in_child, args=(there,))
    child.start()
    assert here.poll(60)
    paid, theirs = here.recv()
    child.join()
    assert paid == 1 and theirs != ours
    assert reward(B(r"\sqrt{52}"), r"2\sqrt{13}") == 1 and verifier._worker.process.pid == ours


def test_worker_ends_with_its_parent():
    code = "import os, reward; reward.start(); print(reward._worker.process.pid, flush=True); os.kill(os.getpid(), 9)"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    worker = int(shown)
    for _ in range(100):
        state = Path(f"/proc/{worker}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":  # gone, or waiting to be reaped by init
            return
        time.sleep(0.1)
    pytest.fail("the worker outlived its parent")


def test_start_says_what_is_missing(monkeypatch, tmp_path):
    """With a math_verify that cannot be imported, start() must raise, or algebra would earn 0 for ever."""
    (tmp_path / "math_verify.py").write_text("raise ImportError('math_verify is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    verifier.stop()
    with pytest.raises(RuntimeError, match="math_verify is broken"):
        verifier.start()


def test_time_limit_is_counted_logged_and_not_tried_twice(caplog):
    begin = time.perf_counter()
    before, monster = verifier.timeouts(), r"\binom{10^9}{4 \cdot 10^8}"
    verdicts = grade([B(monster), B("5"), B(r"\sqrt{63}")], ["5", "5", r"3\sqrt{7}"])
    assert [reason for _, reason in verdicts] == ["timed out", "right", "right"]
    assert time.perf_counter() - begin < 20  # generous, for a busy machine; alone it takes 1 s
    assert "out of time or memory" in caplog.text
    begin = time.perf_counter()
    assert why(B(monster), "5") == "timed out" and time.perf_counter() - begin < 0.2
    assert verifier.timeouts() == before + 1


def test_memory_limit_holds():
    """A comparison that wants 1.2 GB is ended and counted; without the limit this one would be paid."""
    code = """
import multiprocessing, threading, reward
reward.CPU_SECONDS = reward.WALL_SECONDS = 60
reward._equal = lambda gold, answer, algebra: bytearray(int(answer)) is not None
ours, theirs = multiprocessing.Pipe()
threading.Thread(target=reward._serve, args=(theirs,), daemon=True).start()
assert ours.recv() == "ready"
for size in "2000000", "1200000000":
    ours.send(("5", size))
    print(ours.recv())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.split("\n") == ["right", "timed out", ""]


MONSTERS = ["7^{7^{7^{7^{7}}}}", "123456789!", "(10^9)!", "((10^6)!)!", "3^{(10^9)}", "{" * 2000 + "5" + "}" * 2000,
            "(" * 900 + "5" + ")" * 900, "7" * 200_000, "x" + r"\frac{1}{" * 300 + "2" + "}" * 300,
            r"\sum_{k=1}^{10^9} k^k",
            r"\prod_{k=1}^{10^8} k", "(a+b+c+d)^{200}-(a+b)^{200}", r"\binom{10^9}{4\cdot 10^8}", "10^{10^{10}}",
            "8^{9^9}",
            r"\boxed{5}" * 20_000 + r"\boxed{" * 20_000]


def grade_among_monsters(monsters, others):
    numbers = [str(n) for n in range(others)]
    verdicts = grade([B(answer) for answer in numbers + monsters], numbers + ["5"] * len(monsters))
    assert [paid for paid, _ in verdicts] == [1.0] * others + [0.0] * len(monsters)


def test_a_few_monsters_cost_little():
    begin = time.perf_counter()
    long_ones = [monster for monster in MONSTERS if len(monster) > 300]
    grade_among_monsters(long_ones + ["(10^7)!!", r"\sum_{k=1}^{10^8} k^k", "10^{10^{10}}", "(10^9)!"], 100)
    assert time.perf_counter() - begin < 15


@pytest.mark.soak
def test_sixteen_monsters_in_a_batch_of_512():
    begin = time.perf_counter()
    grade_among_monsters(MONSTERS, 496)
    assert time.perf_counter() - begin < 30


PIECES = ["\\boxed{", "\\fbox{", "{", "}", "\\{", "\\}", "<think>", "</think>", "\\frac", "\\sqrt", "\\text{",
"\\left(",
          "\\right]", "(", ")", "[", "]", ",", ";", "=", "+", "-", "^", "_", "\\pm", "\\cup", "\\in", "\\\\", "&",
          "\\begin{pmatrix}", "\\end{pmatrix}", "\\", "$", "%", "!", ".", "e", " ", "\n", "and", "or", "x", "\\pi",
          "\\infty",
          "0", "1", "2", "35", "1,000", "½", "−", "或", "\x00", "\ud800", "####"]


def fuzz(count, seed, monkeypatch):
    """Random strings without a 7 or 9: none may be paid against 797, none may raise. Algebra is left out for speed."""
    monkeypatch.setattr(verifier, "_ask_worker", lambda gold, answer: "unreadable")
    rng = random.Random(seed)
    reasons = set()
    for _ in range(count):
        noise = "".join(rng.choices(PIECES, k=rng.randrange(1, 30)))
        text = rng.choice(["{}", "\\boxed{{{}}}", "\\boxed{{{}}} {}"]).format(noise, noise)
        verdict = verifier._judge(text, "797")  # not grade, which would hide what is raised
        reasons.add(verdict)
        try:
            gold = read_gold(noise)
            assert gold.strip()
            verifier._judge(text, gold)
        except ValueError as error:
            assert str(error) in (EMPTY, UNREADABLE, ROUNDED)
    assert "right" not in reasons and {"wrong", "no box", "unclosed think", "unreadable"} <= reasons


def test_fuzz(monkeypatch):
    fuzz(5000, 0, monkeypatch)


@pytest.mark.soak
def test_fuzz_with_algebra():
    """The same noise through the worker, against golds that need algebra."""
    rng = random.Random(1)
    for _ in range(1000):
        noise = "".join(rng.choices([piece for piece in PIECES if "box" not in piece], k=rng.randrange(1, 12)))
        assert reward(f"\\boxed{{{noise}}}", rng.choice(["797", r"\sqrt{797}", "y^7+797", "(7, 9)"])) == 0


def test_lengths_must_agree():
    with pytest.raises(ValueError):
        grade([B("1")], [])
