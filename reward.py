r"""The verifier: the reward R of a response is 1 if its boxed answer equals the gold answer, and 0 otherwise.

SPPO trains no reward model. All a policy ever learns from is this bit, so both kinds of error are expensive: whatever
is paid by accident becomes a habit within a few hundred steps, and a right answer that goes unpaid is noise for the
critic.

Four ideas carry the file:
  1. Only a finished box after the thinking counts, and it must commit itself: "3 or 5", `x = 4 = 5` and "12 (or 35)"
     name two candidates and earn 0, unless the gold is that very list.
  2. Cheap and exact before clever: equal text, then fractions (never floats), then lists, points and matrices part by
     part. Computer algebra (math-verify on top of sympy) sees only the single expressions that remain.
  3. Algebra runs in another process under a limit on time and memory: no thread can interrupt Python while it works out
     `9^{9^{9^9}}`, but the kernel can end a process. Needs Linux (on macOS the limit on memory is missing).
  4. What cannot be read, on either side, is never paid.
"""
import functools
import logging
import numbers
import os
import re
import signal
import subprocess
import sys
import threading
import unicodedata
from fractions import Fraction
from multiprocessing.connection import Connection, Pipe

CPU_SECONDS, WALL_SECONDS = 1.0, 5.0  # CPU time decides, so that a busy machine does not change verdicts
MEMORY_BYTES = 1 << 30
MAX_CHARS, MAX_DEPTH = 2_000, 30  # of an answer; longer or deeper ones are not worth reading
TOLERANCE = Fraction(1, 10_000)  # relative; only for a gold like 3.21, which somebody has rounded already

log = logging.getLogger(__name__)

# ------------------------------------------------------------------------------------------------------ find the answer

_EMPTY = re.compile(r"(?:\\[lc]?dots|\\text|\\[\s,;:!]|[\s.…{}$~?_])*")  # \boxed{} and \boxed{...} only name the format
_JOINTS = {",", ";", "and", "or", "，", "、", "和", "或", "与"}


def extract_answer(response):
    r"""Return the text inside the box that decides the grade, or None if there is no such box.

    It is the last non-empty `\boxed{}` or `\fbox{}` behind the last `</think>`. Boxes with nothing but a comma or "and"
    between them are one answer, "3, 5". None also stands for unfinished thinking and for a response that stops inside
    its last box, because 12 may be the start of 1234. Accepts any object and never raises.
    """
    return _extract(response)[0]


def _extract(response):
    """Return (answer, "") or (None, why not)."""
    text = response.rpartition("</think>")[2] if isinstance(response, str) else ""
    if "<think>" in text:
        return None, "unclosed think"
    closed, unclosed = _boxes(text)
    closed = [box for box in closed if not _EMPTY.fullmatch(text, box[1], box[2] - 1)]
    # A box left open does no harm if a later line has a whole one; otherwise it is the final answer, cut off.
    if not closed or unclosed and "\n" not in text[unclosed[-1]:closed[-1][0]]:
        return None, "no box"
    answers, next_start = [], None
    for start, inside, end in reversed(closed):
        if answers and not _joined(text[end:next_start]):
            break
        answers.insert(0, text[inside:end - 1].strip())
        next_start = start
    return ", ".join(dict.fromkeys(answers)), ""  # each once: \boxed{60}, \boxed{60} is no list


def _boxes(text):
    r"""Return the outermost boxes as [(start, start of the content, end)] and the starts of those never closed."""
    stack, closed = [], []
    for token in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", text, re.DOTALL):
        if token[0] == "}" and stack:
            start, inside = stack.pop()
            if inside:
                while closed and closed[-1][0] > start:
                    closed.pop()  # in \boxed{\boxed{5}} the outer one counts
                closed.append((start, inside, token.end()))
        elif token[0] == "{" or len(token[0]) > 2:
            stack.append((token.start(), token.end() if len(token[0]) > 2 else None))
    return closed, [start for start, inside in stack if inside]


def _joined(between):
    """Tell whether the text between two boxes makes a list of them: commas, "and", perhaps a name such as `y =`."""
    between = re.sub(r"\b[A-Za-z](?:_\w)?\s*=|\\(?:text|mbox)\b|\\[()\[\],; ]|[${}]", " ", between[:100])
    words = re.findall(r"[A-Za-z]+|[^\sA-Za-z]", between)
    return bool(words) and set(words) <= _JOINTS


# ---------------------------------------------------------------------------------------- one spelling for each thing

_UNICODE = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ",
    "²": "^2", "³": "^3", "√": r"\sqrt ", "½": r"\frac12 ", "≈": "=", "、": ", ", "，": ", ", "。": " ", "±": r"\pm ",
    "∪": r"\cup ", "≤": r"\le ", "≥": r"\ge "})
_TEXT = r"\\(?:text[a-z]*|math(?:rm|bf|it|sf)|[mh]box|operatorname|emph)\s*\{([^{}]*)\}"
_REWRITES = (  # pattern, replacement; the order matters
    (r"(?<=\d)(?:,\s*\\!\s*|\{,\}|\\,)(?=\d{3})", ","),  # 10,\!080 and 10{,}080 and 10\,080
    (r"(\\\\)|\\(?:left|right|[bB]igg?[lr]?|displaystyle|q?quad)(?![A-Za-z])|\\[!,;:> ()\[\]]|\\?\$|[€£~\s]", r"\1 "),
    (r"\\lbrace(?![a-z])", r"\\{"), (r"\\rbrace(?![a-z])", r"\\}"), (r"\\(?:approx|in)(?![a-z])", "="),
    (r"\\(?:text|mbox|mathrm)\s*\{[\s,]*(?:and|or|[和或与])\s*\}|(?<![A-Za-z\\])(?:and|or|\\l?or)(?![A-Za-z])", ", "),
    (r"\\(?:text|mbox)\s*\{\s*percent\s*\}|\\%", "%"),
    (r"\\[dtc]?frac\s*(\d)", r"\\frac{\1}"), (r"\\[dtc]?frac\s*(\{[^{}]*\})\s*(\d)", r"\\frac\1{\2}"),  # \frac12
    (r"\\[dtc]frac", r"\\frac"), (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"), (r"([_^])\s*\{(\w)\}", r"\1\2"))


def _clean(text):
    """Return LaTeX without dollars, sizes and unicode signs, and with a comma between the members of every list."""
    text = unicodedata.normalize("NFKC", text.translate(_UNICODE))  # also turns full-width digits into plain ones
    for pattern, new in _REWRITES:
        text = re.sub(pattern, new, text)
    return text.strip().rstrip(" .,;")


def _squeeze(text):
    """Drop fonts and blanks for the comparison as text; a blank between digits stays, since 2 3 is not 23."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(_TEXT, r"\1", text))


# Any word may be a unit (data sets count apples), but not one that changes the value or could hide a second one.
_NO_UNIT = re.compile(
    r"\b(?:and|or|not|nor|but|if|may ?be|perhaps|possibly|either|zero|one|two|three|four|five|six|seven|eight|nine|ten|"
    r"eleven|twelve|\w+teen|\w+ty|dozen|half|hundreds?|thousands?|\w*illions?|pi|[ap]\.? ?m|(?![mgshlNJWVCF]\b)\w)\b|"
    r"[^A-Za-z\s./^23-]", re.IGNORECASE)
_UNIT = re.compile(rf"(.*[^\s^_])\s*(?:{_TEXT}|"
                   rf"\^\s*\{{?\\circ\}}?|\\degree|(?<=\d)\s*\b([ckm]?m|k?g|ft|[a-z]{{4,}}(?: [a-z]+)*)"
                   r")\s*(?:\^\{?[23]\}?)?", re.DOTALL)


def _strip_unit(text):
    r"""Return the value in front of a unit: 36 \text{ cm}^2, 90^\circ, 12 dollars."""
    unit = _UNIT.fullmatch(text)
    return unit[1] if unit and not _NO_UNIT.search(unit[2] or unit[3] or "") else text


def _number(text):
    r"""Read 42, 27.0, .5, 6e23, 4.5 \times 10^{33}, 7/2, -3\frac{1}{2} or 50% as (value, is decimal, is per cent).

    None for anything else. An exponent has three digits at most, so no number becomes too long to handle.
    """
    text = re.sub(r"\s*(?:\\times|\\cdot|\*)\s*10\^\{?([-+]?\d{1,3})\}?", r"e\1", _strip_unit(text))
    text = re.sub(r"^([-+]?)10\^\{?([-+]?\d{1,3})\}?$", r"\g<1>1e\2", text)
    text = re.sub(r"\\frac\{\s*(-?)\s*(\d+)\s*\}\{\s*(\d+)\s*\}", r"\1 \2/\3", text)
    found = re.fullmatch(r"\s*([-+]?)\s*(?:(\d+)\s+(?=\d+\s*/))?"  # sign, whole part of a mixed number
                         r"(\d+\s*/\s*0*[1-9]\d*|(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d{1,3})?)\s*(%?)", text, re.IGNORECASE)
    if not found:
        return None
    sign, whole, rest, percent = found.groups()
    value = (int(whole or 0) + Fraction(rest.replace(" ", ""))) * (-1 if sign == "-" else 1)
    return value, "/" not in rest and value.denominator > 1, bool(percent)


def _close(gold, answer):
    """Compare exactly, or within TOLERANCE of a gold that is a decimal. 50, 50% and (for 50%) 0.5 agree."""
    (size, rounded, percent), (value, _, other_percent) = gold, answer
    values = [value] if percent == other_percent else [value, value * 100 if percent else value / 100]
    return any(abs(size - v) <= (TOLERANCE * max(abs(size), abs(v)) if rounded else 0) for v in values)


# ------------------------------------------------------------------------------------------------- what counts as equal

_EQUALS = r"(?<![<>!\\])="
_ORDER = re.compile(r"[<>]|\\(?:[lg](?:eq?|t)|neq?)(?![a-z])")


def _equal(gold, answer, algebra):
    """Tell whether two cleaned texts mean the same; algebra(gold, answer) decides about expressions without parts."""
    # 1,234 is one number or a list of two; only the other side can tell, so both readings are tried.
    joined = [re.sub(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)", lambda number: number[0].replace(",", ""), text)
              for text in (gold, answer)]
    return _same(*joined, algebra) or joined != [gold, answer] and _same(gold, answer, algebra)


def _same(gold, answer, algebra):
    """Compare as text, as numbers, or by parts: lists and sets in any order, points and matrices place by place."""
    if _squeeze(gold) == _squeeze(answer):
        return True
    value, other = _number(gold), _number(answer)
    if value and other:
        return _close(value, other)
    (kind, parts), (other_kind, others) = _split(gold), _split(answer)
    kinds = {kind, other_kind}
    if "=" in kinds and "list" not in kinds:
        return _same_equation(gold, answer, algebra)
    if kinds == {""} or "" in kinds and _ORDER.search(gold + answer):  # also an inequality against an interval
        return _same_atom(_strip_unit(gold), _strip_unit(answer), algebra)
    if len(parts) != len(others) or len(kinds) > 1 and kinds not in ({"list", "set"}, {"list", "()"}):
        return False
    if not kinds <= {"list", "set", "union"}:
        return all(_same(a, b, algebra) for a, b in zip(parts, others))
    for part in parts:
        match = next((other for other in others if _same(part, other, algebra)), None)
        if match is None:
            return False
        others.remove(match)
    return True


def _same_equation(gold, answer, algebra):
    """Compare where a side has an equals sign. A name (x = 5) is dropped; each member of a chain must be right."""
    (name, values), (other_name, others) = _drop_name(gold), _drop_name(answer)
    if len(values) == 1 and (not name or not other_name and len(others) == 1 or _squeeze(name) == _squeeze(other_name)):
        return all(_same(values[0], value, algebra) for value in others)
    sides = bool(name) + len(values), bool(other_name) + len(others)
    return sides == (2, 2) and not (name and other_name) and algebra(gold, answer)


def _drop_name(text):
    r"""Return x = 5 as (x, [5]), also f(x), (x, y) or \text{Area} for x; 2x = 5 names nothing: ("", [2x, 5])."""
    sides = _cut(text, _EQUALS)
    for name, values in ((sides[0], sides[1:]), (sides[-1], sides[:-1])):  # 5 = x will do as well
        if values and re.fullmatch(r"[A-Za-z\\ (),'|{}]*", re.sub(r"_(?:\{\w+\}|\w)", "", name)) and name != r"\pi":
            return name, values
    return "", sides


def _same_atom(gold, answer, algebra):
    """Compare two texts without parts: numbers with a base, words, and expressions, which go to algebra."""
    # A base belongs to the number: 1011_2 is neither 1011 nor 11, or an echo of the question would pay.
    bases = [re.fullmatch(r"\(?0*(\d\w*)\)?_\{?(\d+)\}?", _squeeze(text)) for text in (gold, answer)]
    if any(bases):
        return all(bases) and bases[0].groups() == bases[1].groups()
    word, other = ("".join(re.sub(_TEXT, r"\1", text).split()).strip("().").casefold() for text in (gold, answer))
    if word == other and word.replace("-", "").replace("'", "").isalpha():
        return True
    if re.search(r"\\(?:text|mbox)|(?<![\\A-Za-z])[^\W\d_]{4}", gold + answer):
        return False  # a word is no product of letters: stop is not post
    return algebra(gold, answer)


def _split(text):
    """Return (kind, parts): "list", "=", "union", "set", "()", "(]", "matrix" and its shape, or "" for one value."""
    comma = r"(?<!\d),|,(?!\d{3}(?!\d))|;" if ", " in text else "[,;]"  # 10,000, 20,000 has one comma that separates
    for kind, separator in (("list", comma), ("=", _EQUALS), ("union", r"\\cup(?![a-z])")):
        if len(parts := _cut(text, separator)) > 1:
            return kind, _both_signs(parts) if kind == "list" else parts
    if matrix := re.fullmatch(r"\\begin\{([pb]?matrix)\}(.*?)(?:\\\\\s*)?\\end\{\1\}", text, re.DOTALL):
        rows = [_cut(row, "&") for row in _cut(matrix[2], r"\\\\")]
        return f"matrix {[len(row) for row in rows]}", sum(rows, [])
    outer = re.fullmatch(r"(\\?[({\[])(.*?)(\\?[)}\]])", text, re.DOTALL)
    if outer and len(_cut(text, r"(?<=[)}\]])(?!$)")) == 1:  # the first bracket closes at the end, unlike (a)(b)
        kind, parts = (outer[1] + outer[3]).replace(r"\{\}", "set"), _cut(outer[2], comma)
        if len(parts) > 1 and kind != "{}":
            return kind, _both_signs(parts) if kind == "set" else parts
        if kind in ("()", "set", "{}"):
            return _split(outer[2].strip())  # brackets around a single value
    parts = _both_signs([text])
    return "list" if len(parts) > 1 else "", parts


def _cut(text, separator):
    """Split at each separator outside of all brackets."""
    parts, depth, start = [], 0, 0
    tokens = rf"(?P<cut>{separator})|\\\\|(?P<open>\\begin|\\?[({{\[])|(?P<close>\\end|\\?[)}}\]])|\\."
    for token in re.finditer(tokens, text):
        depth += (token["open"] is not None) - (token["close"] is not None)
        if token["cut"] is not None and depth == 0:
            parts.append(text[start:token.start()].strip())
            start = token.end()
    return [*parts, text[start:].strip()]


def _both_signs(parts):
    r"""Write 1 \pm 2 as the two values that it stands for."""
    return [part.replace(r"\pm", sign).replace(r"\mp", "-+"[sign == "-"]).strip()
            for part in parts for sign in ("+-" if r"\pm" in part else "+")]


# ------------------------------------------------------------------------------------- algebra, in a process of its own

class _NeedsAlgebra(Exception):
    """Raised in the training process where a comparison has to go to the worker."""


def _no_algebra(gold, answer):
    raise _NeedsAlgebra


def _algebra(gold, answer):
    """Compare two expressions, equations or inequalities with math-verify. Called inside the worker only."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    config = LatexExtractionConfig(normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False))
    parsed = []
    for text in (gold, answer):
        # Decimals become fractions, so that nothing is compared as a float. Two numbers side by side, "12 (35)",
        # would be read as a mixed number or a product: not readable.
        exact = re.sub(r"(\d*)\.(\d+)", lambda d: rf"{{\frac{{{d[1]}{d[2]}}}{{{10 ** len(d[2])}}}}}", text)
        found = [] if re.search(r"\d\s+\(?\d", exact) else parse(
            f"${exact}$", [config], fallback_mode="no_fallback", parsing_timeout=None)  # _solve has a better alarm
        parsed.append(found[0])  # IndexError: unreadable
    number = _number(gold)
    if number and number[1] and parsed[1].is_number:
        return _close(number, (Fraction(str(parsed[1].evalf(30))), False, number[2]))
    return verify(*parsed, timeout_seconds=None, allow_set_relation_comp=True)


_REASONS = "wrong", "right", "unreadable"  # by exit code


def _serve(channel):
    """The worker: import sympy once (1 s), then give each task to a forked copy of itself, which may die of it."""
    logging.disable(logging.CRITICAL)
    try:
        _algebra(r"3\sqrt{3}+1", r"\frac{5}{2}\sqrt{12}+1")  # unequal, so that all sympy needs is loaded before a fork
        channel.send("ready" if _algebra(r"\sqrt{8}x", r"2x\sqrt{2}") else "math-verify gives wrong answers")
        while True:
            task = channel.recv()
            child = os.fork()
            if child == 0:
                _solve(*task)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            channel.send(_REASONS[code] if code in (0, 1, 2) else "timed out")
    except ImportError as error:
        channel.send(f"{error}; try: pip install math-verify")
    except (EOFError, OSError):  # the training process is gone, and so is the need for this one
        pass


def _solve(gold, answer):
    """Leave with the verdict as exit code. When the time is up, the kernel ends the process, whatever it is doing."""
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    code = 2
    try:
        import resource
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        code = int(_equal(gold, answer, _algebra))
    except MemoryError:
        code = 3
    finally:
        os._exit(code)


class _Worker:
    """The training process's end of the worker: one question at a time, from any thread."""
    lock, process, channel, timeouts = threading.RLock(), None, None, 0

    def start(self):
        # In a forked copy of the training process poll() says "ended" too: it must not talk through its parent's pipe.
        if self.process and self.process.poll() is None:
            return
        self.channel, theirs = Pipe()
        # A fresh interpreter that runs this file: no CUDA, threads or __main__ come along. In a session of its own, as
        # Ctrl-C is for the trainer, which may have answers left to grade.
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), str(theirs.fileno())], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONHASHSEED": "0"})
        theirs.close()
        try:
            hello = self.channel.recv() if self.channel.poll(60) else "no sign of life within 60 s"
        except EOFError:
            hello = "it ended at once"
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
            try:
                self.start()
                self.channel.send((gold, answer))
                if self.channel.poll(2 * WALL_SECONDS):
                    return self.channel.recv()
            except (EOFError, OSError):
                pass
            self.stop()
        return "timed out"


_worker = _Worker()


def start():
    """Start the worker and wait until it is ready (about 1 s).

    Call it before CUDA is initialised; otherwise the first answer that needs algebra does it. Raises RuntimeError with
    the reason, for example that math-verify is not installed.
    """
    with _worker.lock:
        _worker.start()


def stop():
    """End the worker. Not needed at exit: it ends by itself when the process that started it is gone."""
    with _worker.lock:
        _worker.stop()


def timeouts():
    """Return how many different answers have run out of time or memory so far."""
    return _worker.timeouts


@functools.lru_cache(maxsize=10_000)  # a policy repeats itself, and a monster should be ended once, not once a step
def _ask_worker(gold, answer):
    with _worker.lock:
        reason = _worker.ask(gold, answer)
        _worker.timeouts += reason == "timed out"
    if reason == "timed out":
        log.warning("verifier: out of time or memory, graded 0: %.80r", answer)
    return reason


# --------------------------------------------------------------------------------------------------- golds and grades

# Cheap to recognise, so most monsters cost nothing; what gets past is ended by the limits.
_MONSTER = re.compile(r"(?:\^[{(]*\d+){3}|\^[{(]*(?:\d\d+\^|-?\d{5})|\^\{?\d+\}?\)!|\d{4,}[)}]*!|!\)*!|\d{400}")
_CUT_OFF = re.compile(r"(?:[-+*/^_=<>\\]|\\frac\s*(?:\{[^{}]*\})?|\\sqrt)\s*$")


def _readable(text):
    """Tell whether a cleaned text can be an answer: neither long, nor deep, nor cut off (`\\frac{1`, `3 +`)."""
    depths = [0]
    for token in re.findall(r"\\\\|\\begin|\\end|\\?[({\[)}\]]", text[:MAX_CHARS]):
        depths.append(depths[-1] + (token[-1] in "({[n") - (token[-1] in ")}]d"))
    balanced = depths[-1] == min(depths) == 0
    return balanced and len(text) <= MAX_CHARS and max(depths) <= MAX_DEPTH and not _CUT_OFF.search(text)


def read_gold(answer):
    r"""Return the gold answer of a data row as clean text. Call it once a row, when the data is loaded.

    Takes text (bare LaTeX, `$...$`, a GSM8K solution ending in `#### 72`, a solution with a box), a number, or a list
    of one. Raises ValueError with one of three reasons: "empty answer", "unreadable answer" (cut off, or not text at
    all), and "answer above 2^53 that went through a float", meaning an integer of that size which equals its own
    double. Few integers do by chance, all that a float has carried do, and the float has rounded them:
    105263157894736842 arrives as ...848, and 22099999999999999999999 as 22099999999999998951424. The price is that a
    true 2^64 is refused as well; commas or `2^{64}` save it.
    """
    gold = _gold_text(answer)
    whole = re.fullmatch(r"-?(\d{16,300})(?:\.0*)?", gold)
    rounded = whole and int(whole[1]) > 2 ** 53 and int(float(whole[1])) == int(whole[1])
    if rounded or re.fullmatch(r"-?\d\.\d{15,}e\+?(?:1[6-9]|[2-9]\d|\d{3})", gold):
        raise ValueError("answer above 2^53 that went through a float")
    return gold


def _gold_text(answer):
    """Do the work of read_gold but for the rounded integers, which compare well and are the loader's affair."""
    if isinstance(answer, (list, tuple)) and len(answer) == 1:
        answer = answer[0]
    if isinstance(answer, bool) or not isinstance(answer, (str, numbers.Real, type(None))):
        raise ValueError("unreadable answer")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    gold = str(answer).rpartition("####")[2].strip()
    gold = extract_answer(gold) or gold
    gold = re.sub(r"^\$+(.*[^\\])\$+$", r"\1", gold, flags=re.DOTALL).strip()
    if gold.lower() in ("nan", "inf", "-inf", "none", "null") or not re.search(r"\w", gold):
        raise ValueError("empty answer")
    if not _readable(_clean(gold[:MAX_CHARS + 1])):
        raise ValueError("unreadable answer")
    return gold


def _judge(response, gold):
    """Return the reason for one response; raises on a gold that nothing can earn."""
    answer, reason = _extract(response)
    if answer is None:
        return reason
    gold, answer = _clean(_gold_text(gold)), _clean(answer[:MAX_CHARS + 1])
    if not _readable(answer):
        return "unreadable"
    try:
        return "right" if _equal(gold, answer, _no_algebra) else "wrong"
    except _NeedsAlgebra:
        return "unreadable" if _MONSTER.search(_squeeze(answer)) else _ask_worker(gold, answer)


def grade(responses, golds):
    """Grade a batch.

    Arguments: responses, the decoded texts (None counts as no answer); golds, the gold of each, as read_gold returns
    it. Returns one (R, reason) each; reason is "right", "wrong", "no box" (none, empty or unclosed), "unclosed
    think", "unreadable" or "timed out" (also: out of memory). Raises ValueError if the lengths differ; never for what
    the texts hold.
    """
    verdicts = []
    for response, gold in zip(responses, golds, strict=True):
        try:
            reason = _judge(response, gold)
        except Exception as error:  # a reward that raises would cost the whole run
            log.debug("verifier: %r for gold %.80r", error, gold)
            reason = "unreadable"
        verdicts.append((float(reason == "right"), reason))
    return verdicts


def reward(response, gold):
    """Return R of one response: 1.0 if its boxed answer equals the gold, else 0.0. `grade` also says why."""
    return grade([response], [gold])[0][0]


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
