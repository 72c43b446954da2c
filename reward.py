"""The verifier: R = 1 if the boxed answer of a response equals the gold answer, else 0.

SPPO has no learned reward model. All that it learns from is this one bit, so a mistake here is taught to the policy: an
answer paid by accident becomes a habit, and a right answer that is refused turns into noise for the critic. Hence:

    * No box, an unfinished box, or a unclosed `<think>`: 0. Otherwise the last non-empty box after `</think>` decides.
    * Two candidates are no answer: "3 or 5", "x = 4 = 5" and "12 (or 35)" earn 0 unless the gold is that very list.
    * Cheap before clever: equal text, then exact fractions, then sets, tuples and matrices part by part, and only for a
      part that is none of these computer algebra (math-verify, which builds on sympy).
    * `9^{9^{9^9}}` must not stall the training, so algebra runs in its own process, with a limit on time and memory.

What counts as equal is spelled out in `_same`. A trainer calls `start`, `read_gold` and `grade`. Needs Linux or macOS.
"""
import contextlib
import functools
import itertools
import logging
import numbers
import os
import re
import signal
import subprocess
import sys
import threading
from fractions import Fraction
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

CPU_SECONDS, WALL_SECONDS = 1.0, 3.0  # usual is 0.03 s. CPU time, so that a busy machine changes no verdict
MEMORY_BYTES = 1 << 30
MAX_CHARS, MAX_DEPTH = 2_000, 40  # no honest answer is longer, or has more brackets inside each other
TOLERANCE = Fraction(1, 10_000)  # relative, and only for a gold such as 3.21, which somebody has rounded

log = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """R, and why: "right", "wrong", "no box", "unclosed think", "unreadable" or "timed out" (also: out of memory)."""
    reward: float
    reason: str


# --------------------------------------------------------------------------------------------------- finding the answer

_BOX = r"\\(?:boxed|fbox)\s*\{"
# What may stand between two boxes that form one list: at least one comma or word, or it is an answer given twice.
_BLANK = r"(?:[\s$]|\\[()\[\]]|[a-zA-Z]\w?\s*=)*"  # with the dollars around a box, and the name in "x = "
_JOINT = re.compile(rf"{_BLANK}(?:(?:[,;和或与、，]|\b(?:and|or)\b|\\text\{{|\}}){_BLANK})+")


def extract_answer(response):
    """Return the boxed answer that decides the grade, or None (no text, no finished box, or unfinished thinking).

    Boxes joined by nothing but a comma, "and" or "or" come back as one list, "3, 5", so that no candidate is lost.
    """
    return _extract(response)[0]


def _extract(response):
    """Return (answer, "") or (None, reason)."""
    text = response if isinstance(response, str) else ""
    text = text[text.rfind("</think>") + 1:]  # -1 + 1 = 0: the whole text when there was no thinking
    if "<think>" in text:
        return None, "unclosed think"
    chosen, later = None, None
    for start, end in reversed(_boxes(text)):
        if end is None and chosen is None:
            break  # the final box was cut off: 12 may be the beginning of 1234
        inside = "" if end is None else text[start:end - 1].partition("{")[2].strip()
        if not re.sub(r"\\[lc]?dots|\\text|[\s.…{}$~]", "", inside):
            continue  # \boxed{} and \boxed{...} only talk about the format
        if chosen is not None and not _JOINT.fullmatch(text[end:later]):
            break  # other words in between: the earlier box was an attempt, and this one replaces it
        chosen, later = (inside if chosen in (None, inside) else f"{inside}, {chosen}"), start
    return chosen, "" if chosen else "no box"


def _boxes(text):
    """Return [(start, end)] of the outermost boxes; end is None for one that never closes. One pass over any length."""
    stack, found = [], []
    for token in re.finditer(_BOX + r"|\\.|[{}]", text, re.DOTALL):
        if token[0] == "}" and stack:
            start, is_box = stack.pop()
            if is_box:
                while found and found[-1][0] > start:
                    found.pop()  # \boxed{\boxed{5}}: the outer one holds it all
                found.append((start, token.end()))
        elif token[0].endswith("{") and token[0] != r"\{":
            stack.append((token.start(), token[0] != "{"))
    return sorted(found + [(start, None) for start, is_box in stack if is_box], key=lambda box: box[0])


# -------------------------------------------------------------------------------------------------------- reading golds

def read_gold(answer):
    r"""Return the gold answer of one data row as clean text; call it once a row, when the data is loaded.

    Takes text (bare LaTeX, `$...$`, a GSM8K solution ending in `#### 72`, a solution with a box), a number, or a list
    of one. Raises ValueError with a short reason for a gold that could not be earned: "empty", "unreadable: \frac{1",
    or an integer above 2^53 that equals its own double. By chance few of that size do; all that a float carried do, and
    it has rounded them: a 1 and 22 nines arrive as 20000000000000000000000. The price is that true ones (2^64 or 10^20
    written out) are refused too. Write `2^{64}` or `1e20` to keep those.
    """
    gold = _gold_text(answer)
    value = _number(_join_thousands(gold)) if re.fullmatch(r"-?[\d,]+(?:\.0*)?", gold) else None
    if re.fullmatch(r"-?\d\.\d{15,}e\+?\d+", gold) \
            or value and 2 ** 53 < abs(value[0]) < 2 ** 1000 and Fraction(float(value[0])) == value[0]:
        raise ValueError("integer above 2^53 that went through a float")
    return gold


def _gold_text(answer):
    """Do the work of read_gold but for the rounded integers: they compare well, and are the loader's affair."""
    if isinstance(answer, (list, tuple)) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, bool) or not isinstance(answer, (str, numbers.Real, type(None))):
        raise ValueError(f"unreadable: {type(answer).__name__}")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)  # 27.0, and 1e20 in full
    gold = str(answer).rpartition("####")[2].strip()
    gold = extract_answer(gold) or gold
    gold = re.sub(r"^\$+(.*[^\\])\$+$", r"\1", gold, flags=re.DOTALL).strip()
    if not _clean(gold) or gold.lower() in ("nan", "inf", "-inf", "none", "null"):
        raise ValueError("empty")
    if _broken(gold):
        raise ValueError(f"unreadable: {gold[:40]}")
    return gold


def _broken(text):
    r"""Tell whether LaTeX was cut off: a bracket or \begin without its partner, \frac{1}, "3 +"."""
    text = re.sub(r"\\\\|\\[{}]", " ", _clean(text))
    pairs = [len(re.findall(side, text)) for side in (r"[(\[]|\\begin", r"[)\]]|\\end")]  # (3,4] is an interval
    argument = r"\s*(?:§|\w|\\[A-Za-z]+)"
    incomplete = rf"\\frac(?!{argument}{argument})|\\sqrt(?!\s*(?:\[\w+\])?{argument})|[-+*/^_=<\\]\s*$"
    while group := re.search(r"\{([^{}]*)\}", text):  # fold {...} from the inside out, each group becoming one mark
        if re.search(incomplete, group[1]):
            return True
        text = text[:group.start()] + "§" + text[group.end():]
    return pairs[0] != pairs[1] or len(text) > MAX_CHARS or bool(re.search(incomplete + r"|[{}]", text))


# ------------------------------------------------------------------------------------------ one spelling for each thing

_UNICODE = str.maketrans({"−": "-", "–": "-", "－": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ",
                          "≈": "=", "∞": r"\infty ", "°": r"^\circ ", "²": "^2", "³": "^3", "√": r"\sqrt ",
                          "½": r"\frac12",
                          "，": ", ", "、": ", ", "；": ";", "％": "%", "（": "(", "）": ")", "±": r"\pm ", "≤": r"\le ",
                          "≥": r"\ge ", "∪": r"\cup ", "\xa0": " ", **dict(zip("０１２３４５６７８９", "0123456789"))})
_TEXT = r"\\(?:text[a-z]*|math[a-z]+|[mhf]box|boxed|operatorname|emph)\s*\{([^{}]*)\}"
_REWRITES = (
    (r"(?<=\d)(?:,\\!\s*|\{,\}|\\,)(?=\d{3})", ""),  # 10,\!080 and 10{,}080 and 10\,080
    (r"(\\\\)|\\[!,;:> ]|\\(?:left|right|[bB]igg?[lr]?|displaystyle|q?quad)(?![A-Za-z])", r"\1 "),
    (r"(\\\\)|\\?\$|[€£~\n\t]|\\[()\[\]]", r"\1 "),
    (r"\\lbrace(?![a-z])", r"\\{"), (r"\\rbrace(?![a-z])", r"\\}"), (r"\\(?:approx|in)(?![a-z])", "="),
    (r"\\(?:text|mbox)\s*\{[\s,]*(?:and|or|[和或与])\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])", ", "),
    (r"\\text\s*\{\s*percent\s*\}|\\%", "%"),
    (r"\\[dtc]?frac\s*(\d)", r"\\frac{\1}"), (r"\\[dtc]?frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),  # \frac12
    (r"\\[dtc]?frac\s*(\{[^{}]*\})\s*", r"\\frac\1"), (r"([_^])\s*\{(\w)\}", r"\1\2"),
)


def _clean(text):
    """Return LaTeX without sizing commands, dollars and unicode signs, all lists with commas."""
    text = text.translate(_UNICODE)
    for pattern, new in _REWRITES:
        text = re.sub(pattern, new, text)
    return text.strip().rstrip(" .。,;")


def _compact(text):
    """Drop fonts and blanks, except a blank between digits: 2 3 is not 23."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(_TEXT, r"\1", text))


def _join_thousands(text):
    return re.sub(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)", lambda found: found[0].replace(",", ""), text)


# Any word may be a unit, since data sets count apples and students; but no word in which a second candidate could hide.
_HEDGE = re.compile(r"\b(?:and|or|not|nor|but|if|maybe|perhaps|possibly|either|zero|one|two|three|four|five|six|seven|"
                    r"eight|nine|ten|eleven|twelve|dozen|hundred|thousand|\w+(?:teen|ty|llion))s?\b|[或一-十百千万亿]", re.I)
_UNIT = re.compile(rf"(?P<value>.*\S)\s*(?:{_TEXT}|\^\s*\{{?\\circ\}}?|\\degree|(?<=\d)\s(?:[ckm]?m|k?g|inch(?:es)?|"
                   r"f(?:ee|oo)t|miles?|units?|degrees?|dollars?|cents?|hours?|minutes?|seconds?|days?|years?))"
                   r"\s*(?:\^\s*[23])?", re.DOTALL)


def _strip_unit(text):
    r"""Drop a unit behind a value (36 \text{ cm}^2, 90^\circ, 12 dollars). Text that could be a second answer stays."""
    unit = _UNIT.fullmatch(text)
    if unit and re.fullmatch(r"(?:[^\W\d_]|[\s./-]|\^[23])*", unit[2] or "") and not _HEDGE.search(unit[2] or ""):
        return unit["value"]
    return text


def _number(text):
    r"""Read 42, 27.0, .5, 6e23, 4.5 \times 10^{33}, 7/2, -3\frac12 or 50% as (value, rounded, per cent), or None."""
    text = re.sub(r"\s*(?:\\times|\\cdot|\*)\s*10\^\{?([-+]?\d{1,3})\}?", r"e\1", _strip_unit(text))
    text = re.sub(r"^([-+]?)10\^\{?([-+]?\d{1,3})\}?$", r"\g<1>1e\2", text)
    text = re.sub(r"\\frac\{\s*(-?)\s*(\d+)\s*\}\{\s*(\d+)\s*\}", r"\1 \2/\3", text)
    found = re.fullmatch(r"\s*([-+]?)\s*(?:(\d+)\s+(?=\d+\s*/))?"
                         r"(\d+\s*/\s*0*[1-9]\d*|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?)\s*(%?)", text, re.I)
    if not found:
        return None
    sign, whole, rest, percent = found.groups()
    value = (int(whole or 0) + Fraction(re.sub(r"\s", "", rest))) * (-1 if sign == "-" else 1)
    return value, "/" not in rest and value.denominator > 1, bool(percent)


def _same_number(gold, value, percent):
    """Equal, or within the tolerance if the gold is a rounded decimal. Where only one has a %, 50 and 0.5 both fit."""
    size, rounded, gold_percent = gold
    values = [value] if percent == gold_percent else [value, value * 100 if gold_percent else value / 100]
    return any(abs(size - value) <= (TOLERANCE * max(abs(size), abs(value)) if rounded else 0) for value in values)


# ------------------------------------------------------------------------------------------------- what counts as equal

_EQUALS = r"(?<![<>!\\])="


def _same(gold, answer, algebra):
    """Tell whether two pieces of cleaned LaTeX mean the same; algebra(gold, answer) decides what is left over.

    Lists and sets match in any order; tuples, intervals, matrices place by place. A name in front (x = 5) is dropped.
    In a chain of equals signs each member must be right. A base belongs to the number: 1011_2 is neither 1011 nor 11,
    because an echo of the question must not pay when it asks for 11 in base 2.
    """
    if _compact(gold) == _compact(answer):
        return True
    number, other = _number(gold), _number(answer)
    if number and other:
        return _same_number(number, other[0], other[2])
    (kind, parts), (answer_kind, answer_parts) = _split(gold), _split(answer)
    kinds = {kind, answer_kind}
    if "=" in kinds and "list" not in kinds:
        (name, values), (answer_name, answer_values) = _drop_name(gold), _drop_name(answer)
        if len(values) == 1 and (not name or not answer_name or _compact(name) == _compact(answer_name)):
            return all(_same(values[0], value, algebra) for value in answer_values)
        return len(values) == len(answer_values) == 2 and algebra(gold, answer)
    if "" in kinds and re.search(r"[<>]|\\[lg](?:eq?|t)(?![a-z])", gold + answer):
        return algebra(gold, answer)  # two inequalities, or an inequality and an interval
    if kinds == {""}:
        return _same_atom(_strip_unit(gold), _strip_unit(answer), algebra)
    if len(parts) != len(answer_parts) or len(kinds) > 1 and kinds not in ({"list", "set"}, {"list", "()"}):
        return False
    if not kinds <= {"list", "set", "union"}:
        return all(_same(part, other, algebra) for part, other in zip(parts, answer_parts))
    for part in parts:
        match = next((other for other in answer_parts if _same(part, other, algebra)), None)
        if match is None:
            return False
        answer_parts.remove(match)
    return True


def _drop_name(text):
    r"""Return x = 5 as (x, [5]), also with f(x), (x, y) or \text{Area} for x; 2x = 5 names nothing: ("", [2x, 5])."""
    sides = _cut(text, _EQUALS)
    for name, values in ((sides[0], sides[1:]), (sides[-1], sides[:-1])):  # 5 = x will do as well
        bare = re.sub(r"_(?:\{\w+\}|\w)", "", name).strip()
        if values and re.fullmatch(r"[A-Za-z\\ (),'|{}]*", bare) and bare != r"\pi":
            return name, values
    return "", sides


def _same_atom(gold, answer, algebra):
    """Compare two values that have no parts: numbers with a base, words, and what only algebra can tell."""
    bases = [re.fullmatch(r"\(?0*(\d\w*)\)?_\{?(\d+)\}?", _compact(text)) for text in (gold, answer)]
    if any(bases):
        return all(bases) and bases[0].groups() == bases[1].groups()
    plain = [re.sub(_TEXT, r"\1", text).strip(" ().") for text in (gold, answer)]
    if re.fullmatch(r"[^\W\d_]+(?:[\s'-][^\W\d_]+)*", plain[0]):
        if "".join(plain[0].split()).casefold() == "".join(plain[1].split()).casefold():
            return True
        if re.search(_TEXT + r"|[^\W\d_]{4}", gold):
            return False  # a word is not a product of letters: stop is not post
    return algebra(gold, answer)


def _split(text):
    """Return (kind, parts); kind is "list", "=", "union", "set", "()", "(]" ..., "matrix ...", or "" for one value."""
    # "10,000, 20,000": where some commas have a blank behind them, those without one group digits
    comma = r"(?<!\d),|,(?!\d{3}(?!\d))|;" if ", " in text else "[,;]"
    for kind, separator in (("list", comma), ("=", _EQUALS), ("union", r"\\cup(?![a-z])")):
        if len(parts := _cut(text, separator)) > 1:
            return kind, _expand(parts) if kind == "list" else parts
    if matrix := re.fullmatch(r"\\begin\{([pb]?matrix)\}(.*?)(?:\\\\\s*)?\\end\{\1\}", text, re.DOTALL):
        rows = [_cut(row, "&") for row in _cut(matrix[2], r"\\\\")]
        return f"matrix {[len(row) for row in rows]}", sum(rows, [])
    outer = re.fullmatch(r"(\\?[({\[])(.*?)(\\?[)}\]])", text, re.DOTALL)
    if outer and len(_cut(text, r"(?<=[)}\]])(?!$)")) == 1:  # the first bracket closes at the end, unlike (a)(b)
        kind = (outer[1] + outer[3]).replace(r"\{\}", "set")
        parts = _cut(outer[2], comma)
        if len(parts) > 1 and kind != "{}":
            return kind, _expand(parts) if kind == "set" else parts
        if kind in ("()", "set", "{}"):
            return _split(outer[2].strip())  # brackets around one value
    parts = _expand([text])
    return "list" if len(parts) > 1 else "", parts


def _cut(text, separator):
    """Split at each separator that is outside of all brackets."""
    parts, depth, start = [], 0, 0
    tokens = rf"(?P<cut>{separator})|\\\\|(?P<open>\\begin|\\?[({{\[])|(?P<close>\\end|\\?[)}}\]])|\\."
    for token in re.finditer(tokens, text):
        depth += (token["open"] is not None) - (token["close"] is not None)
        if token["cut"] is not None and depth == 0:
            parts.append(text[start:token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def _expand(parts):
    r"""Write 1 \pm 2 as the two values that it stands for."""
    return [value for part in parts for value in
            ([part.replace(r"\pm", "+").replace(r"\mp", "-").removeprefix("+").strip(),
              part.replace(r"\pm", "-").replace(r"\mp", "+")] if r"\pm" in part else [part])]


def _same_either_way(gold, answer, algebra):
    """1,234 is one number or a list of two, and only the other side can tell: try both."""
    joined = _join_thousands(gold), _join_thousands(answer)
    return _same(*joined, algebra) or joined != (gold, answer) and _same(gold, answer, algebra)


# ------------------------------------------------------------------------------------- algebra, in a process of its own

# Cheap to see, so most of them cost nothing. What gets past is killed by the worker's limits.
_MONSTER = re.compile(r"(?:\^[{(]*\d+){3}|\^[{(]*-?\d{5}|\d{4,}[)}]*!|!\)*!")


class _NeedsAlgebra(Exception):
    """Raised in the training process where a comparison has to go to the worker."""


def _no_algebra(gold, answer):
    raise _NeedsAlgebra


def _algebra(gold, answer):
    """Compare two expressions, equations or inequalities with math-verify. Only ever called inside the worker."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    config = LatexExtractionConfig(normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False))
    parsed = []
    for text in (gold, answer):
        # Decimals become fractions, so that nothing is compared as a float. Two numbers side by side, "12 (35)", would
        # be added up like a mixed number, and words would be read as a product of letters: both are refused.
        exact = re.sub(r"(\d*)\.(\d+)", lambda d: rf"{{\frac{{{d[1]}{d[2]}}}{{{10 ** len(d[2])}}}}}", text)
        found = [] if re.search(r"(?<![_\d])\d+\s+\(?\d|\\text|\\mbox", exact) else parse(
            f"${exact}$", [config], fallback_mode="no_fallback", parsing_timeout=None)  # _solve has a better one
        if not found:
            raise ValueError(f"unreadable: {text[:40]}")
        parsed.append(found[0])
    number = _number(gold)
    if number and number[1] and parsed[1].is_number:
        return _same_number(number, Fraction(str(parsed[1].evalf(30))), number[2])
    return verify(*parsed, timeout_seconds=None, allow_set_relation_comp=True, raise_on_error=True)


_EXIT_REASONS = "wrong", "right", "unreadable"  # by exit code
# Equal pairs, compared before the first fork: what sympy and the parser load and cache for them, each copy then has.
_WARM_UP = ((r"\frac{\sqrt{3}}{3}x", r"\frac{x}{\sqrt{3}}"), (r"\sin(\pi)+3i", "3i"), ("y=2x+3", "2x-y+3=0"),
            ("x<5", "5>x"), ("(a+5)(b+2)", "ab+2a+5b+10"), (r"x^5-x^4+\cot x", r"\cot x+x^4(x-1)"), ("2", r"\log_2 4"))


def _solve(gold, answer):
    """Answer one task by this process's exit code. The kernel ends it in time, which no bigint loop can delay."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    try:
        code = int(_same_either_way(gold, answer, _algebra))
    except MemoryError:
        code = 99
    except BaseException:
        code = 2
    os._exit(code)


def _serve(channel):
    """The worker: import sympy once (1 s), then give each task a forked copy of this process (7 ms), which may die."""
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ImportError, ValueError, OSError):  # macOS does not know this limit
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        channel.send("ready" if all([_algebra(*pair) for pair in _WARM_UP]) else "math-verify gives wrong answers")
    except Exception as error:
        channel.send(f"{error} (is math-verify installed? pip install -r requirements.txt)")
    with contextlib.suppress(EOFError, OSError):  # the end of the training process is the end of this one
        while True:
            task = channel.recv()
            child = os.fork()
            if child == 0:
                _solve(*task)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            channel.send(_EXIT_REASONS[code] if 0 <= code <= 2 else "timed out")


class _Worker:
    """The training process's end of the worker. One question at a time, from any thread (the caller holds the lock)."""

    def __init__(self):
        self.lock, self.process, self.channel = threading.Lock(), None, None

    def start(self):
        # poll() says "ended" in a forked copy of the training process too; it must not talk through its parent's pipe
        if self.process and self.process.poll() is None:
            return
        self.channel, theirs = Pipe()
        # A new interpreter that runs this file: the caller's threads, CUDA context and __main__ do not come along. In a
        # session of its own, because Ctrl-C is for the trainer, which may still have answers to grade.
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        hello = "no sign of life"
        with contextlib.suppress(EOFError, OSError):
            hello = self.channel.recv() if self.channel.poll(60) else "not ready after 60 s"
        if hello != "ready":
            self.stop()
            raise RuntimeError(f"the verifier's worker did not start: {hello}")

    def stop(self):
        if self.process:
            self.channel.close()
            self.process.kill()
            self.process.wait()
        self.process = None

    def ask(self, gold, answer):
        for _ in range(2):  # once more if the worker has died since the last question
            with contextlib.suppress(EOFError, OSError):
                self.start()
                self.channel.send((gold, answer))
                if self.channel.poll(2 * WALL_SECONDS):
                    return self.channel.recv()
            self.stop()
        return "timed out"


_worker = _Worker()


def start():
    """Start the worker and wait until it is ready (1 to 2 s), best before CUDA is initialised. Without this call, the
    first answer that needs algebra does it. Raises RuntimeError with the reason, such as a missing math-verify."""
    with _worker.lock:
        _worker.start()


def stop():
    """End the worker. Not needed at exit: it ends with the process that started it."""
    with _worker.lock:
        _worker.stop()


@functools.lru_cache(maxsize=10_000)  # a policy repeats itself, and a monster is to be killed once, not once a step
def _ask_worker(gold, answer):
    with _worker.lock:
        reason = _worker.ask(gold, answer)
    if reason == "timed out":
        log.warning("verifier: out of time or memory, counted as wrong: %.80r", answer)
    return reason


# --------------------------------------------------------------------------------------------------------- the verifier

def _judge(response, gold):
    """Return the reason for one response; raises on a gold that no answer can earn."""
    answer, reason = _extract(response)
    if answer is None:
        return reason
    depth = max(itertools.accumulate((char in "([{") - (char in ")]}") for char in answer))
    if len(answer) > MAX_CHARS or depth > MAX_DEPTH:
        return "unreadable"
    gold, answer = _clean(_gold_text(gold)), _clean(answer)
    try:
        return "right" if _same_either_way(gold, answer, _no_algebra) else "wrong"
    except _NeedsAlgebra:
        return "unreadable" if _MONSTER.search(_compact(answer)) else _ask_worker(gold, answer)


def grade(responses, golds):
    """Grade a batch.

    Arguments: responses, the decoded texts (None is no answer); golds, the gold of each, as read_gold returns it.
    Returns one Verdict(reward, reason) each. "timed out" also stands for an answer that ran out of memory.
    Policy: what cannot be read, on either side, earns 0; what `_same` calls equal earns 1.
    Raises ValueError if the lengths differ, and never for what the texts contain.
    """
    verdicts = []
    for response, gold in zip(responses, golds, strict=True):
        try:
            reason = _judge(response, gold)
        except Exception as error:  # a reward that raises would cost the whole run
            log.debug("verifier: %r against gold %.80r", error, gold)
            reason = "unreadable"
        verdicts.append(Verdict(float(reason == "right"), reason))
    return verdicts


def reward(response, gold):
    """Return R for one response: 1.0 if its boxed answer equals the gold, else 0.0. `grade` also says why."""
    return grade([response], [gold])[0].reward


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
