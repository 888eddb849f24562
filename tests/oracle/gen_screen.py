#!/usr/bin/env python3
"""Writes tests/golden/screen/sequences.txt: random keys for the line editor, and the screens that they have to leave.

    gen_screen.py               always the same bytes
    gen_screen.py --check       compares with the file instead of writing it
    gen_screen.py --seed N      tries other keys and writes nothing

It needs build/test_moe, Debian's libvterm0 (made with 0.1.4) and from PyPI pyte (0.8.2), wcwidth (0.9.4) and regex
(2026.11.15). The test repl/screen-random replays the file without any of them.

Two things are worked out here without a line of moe's code. `Editor` models the text, the cursor and what each key does
to them; its characters are those of regex's \\X. `layout` puts prompt and text into rows, with as many columns for a
character as the terminal gives it that gives it the most. The screen that this makes is compared with the screens of
three terminals, to which the real bytes of the editor in build/test_moe go:

    libvterm    columns of single code points by its own tables
    pyte        columns of single code points by the tables of the module wcwidth, which differ
    clusters    a terminal that draws all code points of a character in one place, as wide as wcwidth.wcswidth says

Lines about whose width they agree are also printed in one piece on an empty libvterm: it has to wrap them in the same
places. The file is written if nothing differs.

Its lines, in which \\xNN is a byte:
    width CP A B        columns of a code point on libvterm and pyte, if not 1 on both
    cluster TEXT N      several code points that the third terminal draws in one place, and its columns
    size ROWS COLS      a new editor
    line TEXT           a text that is entered first
    keys BYTES          keys that are typed at once; then the editor draws
    cursor ROW A B C    the cursor's row, and its column on each terminal
    screen              the screen is as in the lines after this one
    |TEXT               a row of the screen; those at its end that are empty are left out
    text TEXT           what Enter then reads
"""
import copy
import ctypes
import fcntl
import functools
import os
import pty
import random
import select
import struct
import sys
import termios
import time
import unicodedata
from pathlib import Path

import pyte
import regex
import wcwidth

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "tests/golden/screen/sequences.txt"
SEED, SEQUENCES = 20, 200
SIZES = ((24, 80), (10, 40))
PROMPT, CONTINUATION = "> ", ". "
SYNC = b"\x1b[?7777h"  # what the editor in test_moe answers to Tab
FOLD_LINES, FOLD_BYTES = 8, 400
FOLD = 0xF0000  # a fold is a code point from here on in Editor.text

# ---- terminals ----


class Libvterm:
    lib = None

    def __init__(self, rows, cols):
        if not Libvterm.lib:
            lib = Libvterm.lib = ctypes.CDLL("libvterm.so.0")
            for name in ("vterm_new", "vterm_obtain_screen", "vterm_obtain_state"):
                getattr(lib, name).restype = ctypes.c_void_p
        lib, self.rows, self.cols = Libvterm.lib, rows, cols
        self.vt = ctypes.c_void_p(lib.vterm_new(rows, cols))
        lib.vterm_set_utf8(self.vt, 1)
        self.screen = ctypes.c_void_p(lib.vterm_obtain_screen(self.vt))
        self.state = ctypes.c_void_p(lib.vterm_obtain_state(self.vt))
        lib.vterm_screen_reset(self.screen, 1)

    def __del__(self):
        Libvterm.lib.vterm_free(self.vt)

    class Pos(ctypes.Structure):
        _fields_ = [("row", ctypes.c_int), ("col", ctypes.c_int)]

    def feed(self, s):
        b = s.encode()
        self.lib.vterm_input_write(self.vt, b, ctypes.c_size_t(len(b)))

    def cursor(self):
        p = self.Pos()
        self.lib.vterm_state_get_cursorpos(self.state, ctypes.byref(p))
        return p.row, p.col

    def row(self, r):
        out, cell = "", ctypes.create_string_buffer(256)
        for c in range(self.cols):
            self.lib.vterm_screen_get_cell(self.screen, self.Pos(r, c), cell)
            chars = struct.unpack("6I", cell.raw[:24])
            if chars[0] != 0xFFFFFFFF:
                n = chars.index(0) if 0 in chars else 6  # what follows is not cleared
                out += "".join(map(chr, chars[:n])) or " "
        return out.rstrip(" ")

    @staticmethod
    def same(got, want):
        return got == want


class PyteScreen(pyte.Screen):
    def draw(self, data):
        """For a mark on what stands in the last column, pyte itself begins a row."""
        if self.cursor.x < self.columns or wcwidth.wcwidth(data):
            super().draw(data)
        elif unicodedata.combining(data):
            line, x = self.buffer[self.cursor.y], self.columns - 1
            line[x] = line[x]._replace(data=line[x].data + data)


class Pyte:
    screen_class = PyteScreen

    def __init__(self, rows, cols):
        self.rows, self.cols = rows, cols
        self.screen = self.screen_class(cols, rows)
        self.stream = pyte.Stream(self.screen)

    def feed(self, s):
        for c in s:  # pyte drops the rest of a piece after a joiner
            self.stream.feed(c)

    def cursor(self):
        return self.screen.cursor.y, self.screen.cursor.x

    def row(self, r):
        return "".join(self.screen.buffer[r][c].data for c in range(self.cols)).rstrip(" ")

    @staticmethod
    def same(got, want):
        """It composes, and keeps nothing but combining characters of what takes no column."""
        norm = lambda s: unicodedata.normalize(
            "NFC", "".join(c for c in s if wcwidth.wcwidth(c) or unicodedata.combining(c))).rstrip(" ")
        return norm(got) == norm(want)


class ClusterScreen(pyte.Screen):
    last = None  # row, column, text and columns of the character that was printed last

    def draw(self, data):
        for c in data:
            x, y = self.cursor.x, self.cursor.y
            if self.last and self.last[0] == y and self.last[1] + self.last[3] == x:
                _, col, text, _ = self.last
                if joined(text + c) or not columns(c):
                    self.put(y, col, text + c, columns(text + c) if joined(text + c) else self.last[3])
                    continue
            width = columns(c)
            if x + width > self.columns:
                self.carriage_return()
                self.linefeed()
            self.put(self.cursor.y, self.cursor.x, c, width)

    def put(self, y, x, text, width):
        line = self.buffer[y]
        if x < self.columns:
            line[x] = self.cursor.attrs._replace(data=text)
        for i in range(x + 1, min(x + width, self.columns)):
            line[i] = self.cursor.attrs._replace(data="")
        self.cursor.x = min(x + width, self.columns)
        self.last = (y, x, text, width)
        self.dirty.add(y)


class Clusters(Pyte):
    screen_class = ClusterScreen

    @staticmethod
    def same(got, want):
        return got == want


@functools.cache
def joined(text):
    return regex.fullmatch(r"\X", text) is not None


@functools.cache
def columns(cluster):
    return max(0, wcwidth.wcswidth(cluster))


TERMINALS = (Libvterm, Pyte, Clusters)


def cursor_after(terminal, cols, text):
    """Where the cursor is after text in an empty row."""
    t = terminal(4, cols)
    t.feed(text)
    return t.cursor()


@functools.cache
def widths(cluster):
    """Its columns on each terminal."""
    return [cursor_after(t, 80, cluster)[1] for t in TERMINALS]


@functools.cache
def most(cluster):
    """The most that a terminal can give it: of each code point the most, and what a selector of the emoji form adds."""
    emoji = sum(columns(a + b) - columns(a) for a, b in zip(cluster, cluster[1:]) if b == "\ufe0f")
    n = emoji + sum(max(widths(c)) for c in cluster)
    assert n >= max(widths(cluster)), ascii(cluster)
    return n


# ---- what the keys do ----


@functools.lru_cache(1000)
def units(text):
    """Clusters, line ends, folds."""
    return regex.findall(r"[\U000f0000-\U000ffffd]|\n|\X", text)


class Editor:
    """The text, the cursor and what was cut and typed before."""

    def __init__(self, history):
        self.text, self.cursor = "", 0
        self.folds = []
        self.cuts, self.yanked, self.yanked_at = [], 0, 0
        self.steps, self.in_step = [], False
        self.last = self.action = ""
        self.history, self.at, self.draft = list(history), len(history), ""

    # places between units

    def bounds(self):
        at, out = 0, [0]
        for u in units(self.text):
            at += len(u)
            out.append(at)
        return out

    def before(self):
        return max([b for b in self.bounds() if b < self.cursor], default=0)

    def after(self):
        return min([b for b in self.bounds() if b > self.cursor], default=len(self.text))

    def line_start(self):
        return self.text.rfind("\n", 0, self.cursor) + 1

    def line_end(self):
        end = self.text.find("\n", self.cursor)
        return len(self.text) if end < 0 else end

    @staticmethod
    def is_word(c, blanks):
        if ord(c) >= 0x80:
            return True
        return c not in " \t\n\v\f\r" if blanks else c.isalnum()

    def word_left(self, blanks):
        start, inside = 0, False
        for b in self.bounds():
            if b >= self.cursor:
                break
            word = self.is_word(self.text[b], blanks)
            if word and not inside:
                start = b
            inside = word
        return start

    def word_right(self):
        stops = [self.cursor] + [b for b in self.bounds() if b > self.cursor]
        i = 0
        for want in (False, True):
            while i + 1 < len(stops) and self.is_word(self.text[stops[i]], False) == want:
                i += 1
        return stops[i]

    # changes

    def step(self):
        if not self.in_step:
            self.in_step = True
            self.steps.append((self.text, self.cursor, self.at))

    def insert(self, s):
        if s:
            self.step()
            self.text = self.text[: self.cursor] + s + self.text[self.cursor :]
            self.cursor += len(s)

    def delete(self, start, end):
        if start != end:
            self.step()
            self.text = self.text[:start] + self.text[end:]
            self.cursor = start

    def paste(self, s):
        s = s.replace("\r\n", "\n").replace("\r", "\n")
        lines = s.count("\n") + (s[-1:] not in ("", "\n"))
        if lines > FOLD_LINES or len(s.encode()) > FOLD_BYTES:
            self.folds.append((s, lines))
            s = chr(FOLD + len(self.folds) - 1)
        self.insert(s)

    def cut(self, start, end):
        if start == end:
            return
        piece = self.text[start:end]
        self.action = "cut"
        if self.last == "cut" and self.cuts:
            before = self.cuts.pop()
            piece = piece + before if start < self.cursor else before + piece
        self.cuts.append(piece)
        self.delete(start, end)

    def yank(self, older):
        n = len(self.cuts)
        if not n or (older and self.last != "yank"):
            return
        self.yanked = (self.yanked - 1) % n if older else n - 1
        if older:
            self.delete(self.yanked_at, self.cursor)
        self.yanked_at = self.cursor
        self.insert(self.cuts[self.yanked])
        self.action = "yank"

    def swap(self):
        bounds = [b for b in self.bounds() if b < self.cursor]
        if len(bounds) >= 2:
            first, second, end = bounds[-2], bounds[-1], self.cursor
            piece = self.text[first:second]
            self.delete(first, second)
            self.cursor = end - (second - first)
            self.insert(piece)

    def go(self, to):
        """Another text of the history; after the last comes the new one."""
        n = len(self.history)
        self.step()
        if (self.at == n) != (to == n):
            self.text, self.draft = self.draft, self.text
        if to < n:
            self.text = self.history[to]
        self.at, self.cursor = to, len(self.text)

    def undo(self):
        self.in_step = True
        while self.steps:
            text, cursor, at = self.steps.pop()
            same = text == self.text
            if at != self.at:
                self.go(at)
            self.text, self.cursor = text, cursor
            if not same:
                break

    def vertical(self, step, cols):
        rows, places = layout(self, cols)
        row, col = max((p for p in places if p[0] <= self.cursor), key=lambda p: p[0])[1:]
        goal = [p for p in places if p[1] == row + step]
        if goal:
            self.cursor = max([p[0] for p in goal if p[2] <= col], default=goal[0][0])
        elif 0 <= self.at + step <= len(self.history):
            self.go(self.at + step)

    def key(self, name, cols):
        """name: a code point that is typed, a name of KEYS, or (paste,)."""
        typed = isinstance(name, str) and len(name) == 1
        blank = self.cursor > 0 and self.text[self.cursor - 1] in " \t\n\v\f\r"
        self.last = self.action
        self.in_step = typed and self.last == "typed" and (not blank or name == " ")
        self.action = "typed" if typed else ""
        at = self.cursor
        if typed:
            self.insert(name)
        elif isinstance(name, tuple):
            self.paste(name[0])
        elif name == "newline":
            self.insert("\n")
        elif name == "home":
            self.cursor = self.line_start()
        elif name == "end":
            self.cursor = self.line_end()
        elif name == "left":
            self.cursor = self.before()
        elif name == "right":
            self.cursor = self.after()
        elif name in ("up", "down"):
            self.vertical(-1 if name == "up" else 1, cols)
        elif name == "word-left":
            self.cursor = self.word_left(False)
        elif name == "word-right":
            self.cursor = self.word_right()
        elif name == "delete":
            self.delete(at, self.after())
        elif name == "backspace":
            self.delete(self.before(), at)
        elif name == "kill":
            self.cut(at, self.line_end() if self.line_end() > at else self.after())
        elif name == "kill-start":
            self.cut(self.line_start(), at)
        elif name == "rubout-blanks":
            self.cut(self.word_left(True), at)
        elif name == "rubout":
            self.cut(self.word_left(False), at)
        elif name == "kill-word":
            self.cut(at, self.word_right())
        elif name == "yank":
            self.yank(False)
        elif name == "yank-older":
            self.yank(True)
        elif name == "swap":
            self.swap()
        elif name == "undo":
            self.undo()
        elif name == "clear":
            self.delete(0, len(self.text))
            self.at = len(self.history)
        else:
            assert name in ("sync", "redraw"), name

    def whole(self):
        return "".join(self.folds[ord(c) - FOLD][0] if FOLD <= ord(c) < FOLD + 0xfffe else c for c in self.text)


KEYS = {  # what a terminal sends, and how often
    "newline": (6, "\n", "\x1b\r"),
    "home": (3, "\x01", "\x1b[H", "\x1bOH", "\x1b[1~"),
    "end": (3, "\x05", "\x1b[F", "\x1b[4~"),
    "left": (12, "\x02", "\x1b[D", "\x1bOD"),
    "right": (6, "\x06", "\x1b[C"),
    "up": (8, "\x10", "\x1b[A"),
    "down": (5, "\x0e", "\x1b[B"),
    "word-left": (4, "\x1bb", "\x1b[1;5D"),
    "word-right": (3, "\x1bf", "\x1b[1;5C"),
    "delete": (3, "\x04", "\x1b[3~"),
    "backspace": (6, "\x7f", "\x08"),
    "kill": (2, "\x0b"),
    "kill-start": (2, "\x15"),
    "rubout-blanks": (2, "\x17"),
    "rubout": (2, "\x1b\x7f"),
    "kill-word": (2, "\x1bd"),
    "yank": (6, "\x19"),
    "yank-older": (2, "\x1by"),
    "swap": (3, "\x14"),
    "undo": (4, "\x1f", "\x18\x15"),
    "clear": (0.3, "\x03"),
    "redraw": (0.5, "\x0c"),
}

# ---- the screen that is expected ----


def unit_cells(folds, unit):
    """What is printed for a unit: pieces that no row may break."""
    cp = ord(unit[0])
    if FOLD <= cp < FOLD + 0xfffe:
        lines = folds[cp - FOLD]
        return list("[pasted %d line%s]" % (lines, "" if lines == 1 else "s"))
    if unit == "\t":
        return list("    ")
    if cp < 32 or cp == 127:
        return ["^", chr(cp ^ 64)]
    if 0x80 <= cp < 0xA0:
        return list("\\x%02x" % cp)
    return [unit]


def layout(ed, cols):
    """The rows, and for each unit and the end of the text its index, row and column (the most that a terminal gives).
    A cell that does not fit goes to the next row; after one in the last column begins a new row."""
    return layout_text(ed.text, tuple(lines for _, lines in ed.folds), cols)


@functools.lru_cache(1000)
def layout_text(text, folds, cols):
    rows, places = [PROMPT], []
    col, at = len(PROMPT), 0

    def put(cell):
        nonlocal col
        w = most(cell)
        if col + w > cols:
            rows.append("")
            col = 0
        rows[-1] += cell
        col += w
        if col >= cols:
            rows.append("")
            col = 0

    for unit in units(text):
        cells = [] if unit == "\n" else unit_cells(folds, unit)
        if len(cells) == 1 and col + most(unit) > cols:
            rows.append("")
            col = 0
        places.append((at, len(rows) - 1, col))
        if unit == "\n":
            rows.append(CONTINUATION)
            col = len(CONTINUATION)
        for cell in cells:
            put(cell)
        at += len(unit)
    places.append((at, len(rows) - 1, col))
    return rows, places


def prefix(ed, cols):
    """The row of the cursor, and what stands in it before the cursor."""
    index = max(b for b in ed.bounds() if b <= ed.cursor)
    part = copy.copy(ed)
    part.text = ed.text[:index]
    rows, _ = layout(part, cols)
    whole, places = layout(ed, cols)
    row = next(p[1] for p in places if p[0] == index)
    return row, rows[row] if row < len(rows) else ""


class View:
    """Which rows are on the screen: the text begins in row `origin`, at its row `top`."""

    def __init__(self, rows, above):
        self.height = rows
        self.above = above[-(rows - 1) :] if rows > 1 else []
        self.origin, self.top = len(self.above), 0

    def draw(self, n, cursor):
        """A text taller than the screen moves as little as keeps the cursor in view."""
        self.top = min(self.top, max(0, n - self.height))
        self.top = max(min(self.top, cursor), cursor - self.height + 1)
        scrolled = max(0, self.origin + min(n, self.height) - self.height)
        self.above = self.above[scrolled:]
        self.origin -= scrolled

    def state(self):
        return self.top, self.origin, tuple(self.above)


def wrapped_by_terminal(ed, rows, cols):
    """Lines whose width is certain have to be wrapped as libvterm wraps them when they are printed in one piece."""
    n = 0
    for i, line in enumerate(regex.split("\n", ed.text)):
        part = copy.copy(ed)
        part.text = line
        cells = [c for u in units(line) for c in unit_cells([lines for _, lines in ed.folds], u)]
        mine = len(layout(part, cols)[0])
        if all(len(set(widths(c))) == 1 and sum(bool(widths(x)[0]) for x in c) == 1 for c in cells):
            t = Libvterm(mine + 1, cols)
            t.feed((CONTINUATION if i else PROMPT) + "".join(cells))
            got = [t.row(r) for r in range(mine)]
            want = [r.rstrip(" ") for r in rows[n : n + mine]]
            assert all(Libvterm.same(g, w) for g, w in zip(got, want)), (got, want)
        n += mine


def expected(ed, view, cols):
    """Rows of the screen, row of the cursor, its column on each terminal."""
    rows, _ = layout(ed, cols)
    row, before = prefix(ed, cols)
    wrapped_by_terminal(ed, rows, cols)
    shown = view.above + [r.rstrip(" ") for r in rows[view.top : view.top + view.height]]
    while shown and not shown[-1]:
        shown.pop()
    return shown, view.origin + row - view.top, [cursor_after(t, cols, before)[1] for t in TERMINALS]


# ---- random keys ----

WORDS = ["a", "Z", "7", " ", "-", "the ", "quick ", "brown fox ", "jumps", "over; ", "a_b.c ", "longer words here "]
SIGNS = [
    "\u65e5", "\u65e5\u672c\u8a9e", "\ud55c\uad6d\uc5b4 ", "\uff21\uff22", "\u300c\u4e2d\u6587\u300d", "\u3002",
    "\u1112\u1161\u11ab",  # Hangul in parts
    "\U0001f600", "\U0001f44d", "\U0001f44d\U0001f3fd", "\u261d\U0001f3fb",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f469\U0001f3fd\u200d\U0001f680",
    "\U0001f3f3\ufe0f\u200d\U0001f308", "\u2764\ufe0f", "\u2708\ufe0f", "\u2615\ufe0e", "1\ufe0f\u20e3", "#\ufe0f\u20e3",
    "\U0001f441\ufe0f\u200d\U0001f5e8\ufe0f", "\U0001f469\u200d",
    "\U0001f1e9\U0001f1ea", "\U0001f1eb\U0001f1f7\U0001f1ef\U0001f1f5", "\U0001f1ec",
    "e\u0301", "o\u0302\u0323", "n\u0303\u0331\u0334", "\u0301", "\u00fc",
    "\u0928\u093f", "\u0915\u093e", "\u0926\u0941", "\u0939\u093f\u0902 ", "\u0928\u092e\u094b ",  # Devanagari
    "\u0b95\u0bca", "\u0995\u09bf", "\u0e17\u0e35\u0e48", "\u0e01\u0e33",  # Tamil, Bengali, Thai
    "\u0633\u0644\u0627\u0645 ", "\u0645\u064f", "\u0645\u06cc\u200c\u062e", "\u0600\u0661\u0662",  # Arabic
    "\u05e9\u05dc\u05d5\u05dd ", "\u05e9\u05b8\u05c1", "\u200f", "\u200e",  # Hebrew, marks of direction
    "\u00a0", "\u3000", "\u2014", "\u2502", "\u00ad", "\u0085", "\u009b",
    "\u4dc0", "\U0001d306", "\u31e4",  # signs that only newer terminals draw in two columns
    "\U0001f3fd", "\u093f", "\ufe0f", "\u200d",  # parts of clusters alone
]
PASTES = ["one\rtwo\r\nthree", "a\tb", "x\x1b[31m\x01", "1\r2\r3\r4\r5\r6\r7\r8\r9"]
LONG = "word " * 81


def item(rng):
    """Keys that come together, each with the bytes that a terminal sends for it."""
    kind = rng.choices(("words", "signs", "paste", "key"), (28, 34, 3, 35))[0]
    if kind == "key":
        name = rng.choices(list(KEYS), [k[0] for k in KEYS.values()])[0]
        repeat = rng.choice((1, 1, 2, 4)) if name in ("left", "right", "up", "down", "backspace", "undo") else 1
        return [(name, rng.choice(KEYS[name][1:]))] * repeat
    if kind == "paste":
        s = LONG if rng.random() < 0.05 else rng.choice(PASTES + ["".join(rng.choices(WORDS + SIGNS, k=12))])
        return [((s,), "\x1b[200~%s\x1b[201~" % s)]
    s = "".join(rng.choices(WORDS if kind == "words" else SIGNS, k=rng.choice((1, 1, 2, 5))))
    return [(c, c) for c in s]


class Sequence:
    """One editor from its start on. `dump`: its lines for the file."""

    def __init__(self, rng, size):
        self.rng, (self.rows, self.cols) = rng, size
        self.dump, self.clusters, self.chars = [], set(), set()
        self.lines = ["".join(rng.choices(WORDS + SIGNS[:9], k=rng.randrange(1, 4)))[:16].strip(" ") or "x"
                      for _ in range(rng.randrange(0, 8))]  # each fits into a row
        kept, above = [], []
        for s in self.lines:
            if not kept or kept[-1] != s:
                kept.append(s)
            above += [PROMPT + s, "=" + s]
            self.chars.update(c for c in s if ord(c) >= 0xA0)
        self.ed = Editor(kept)
        self.view = View(self.rows, above)

    def apply(self, keys, sync_each):
        """Types keys. Returns what is sent, in pieces after each of which the editor draws, or None if the screen
        depends on what else it draws."""
        ed, views, pieces, piece = self.ed, [self.view], [], ""

        def draw_all(views):
            height, row = len(layout(ed, self.cols)[0]), prefix(ed, self.cols)[0]
            for v in views:
                v.draw(height, row)

        def sync():
            nonlocal views, piece, pieces
            ed.key("sync", self.cols)
            draw_all(views)
            views = list({v.state(): v for v in views}.values())
            pieces.append(piece)
            piece = ""

        for name, sent in keys:
            if not ed.text and name in ("delete", "clear"):
                continue  # would end the editor
            ed.key(name, self.cols)
            piece += sent
            if name == "redraw":
                for v in views:
                    v.origin, v.above = 0, []
            drawn = [copy.copy(v) for v in views]
            draw_all(drawn)
            views = list({v.state(): v for v in views + drawn}.values())
            self.chars.update(c for c in ed.whole() if ord(c) >= 0xA0)
            for u in units(ed.text):
                self.clusters.update(u[:i] for i in range(2, len(u) + 1) if joined(u[:i]))
            if sync_each:
                sync()
        if not sync_each:
            sync()
        self.view = views[0]
        return pieces if len(views) == 1 else None

    def run(self, tty):
        """Types it all; compares screens and the text."""
        dump = self.dump
        dump.append("size %d %d" % (self.rows, self.cols))
        for s in self.lines:
            dump.append("line " + escape(s))
            tty.enter(s)
        tall = self.rows < 20 and self.rng.random() < 0.5  # the text is taller than the screen
        for chunk in range(self.rng.randrange(2, 6)):
            before, bad = copy.deepcopy((self.ed, self.view)), True
            while bad:
                keys = [k for _ in range(self.rng.randrange(4, 16)) for k in item(self.rng)]
                if tall and not chunk:
                    keys = [("newline", "\n")] * self.rows + keys
                pieces = self.apply(keys, False)
                if pieces is None:
                    self.ed, self.view = copy.deepcopy(before)
                    pieces = self.apply(keys, True)
                # terminals differ in what they do with a mark without a cell in front of it
                bad = any(r and not widths(r[0])[0] for r in layout(self.ed, self.cols)[0])
                bad |= any(len(p.encode()) > 500 for p in pieces)  # the test writes 512 bytes at once
                if bad:
                    self.ed, self.view = copy.deepcopy(before)
            for p in pieces:
                dump.append("keys " + escape(p))
                tty.send(p)
            self.check(tty)
            rows, row, cols = expected(self.ed, self.view, self.cols)
            dump.append("cursor %d %d %d %d" % (row, *cols))
            for c in regex.findall(r"\X", "\n".join(layout(self.ed, self.cols)[0])):
                self.clusters.update(c[:i] for i in range(2, len(c) + 1))
        dump.append("screen")
        dump.extend("|" + escape(r) for r in rows)
        shown = "".join("\\x%02x" % ord(c) if ord(c) < 32 or ord(c) == 127 else c for c in self.ed.whole())
        dump.append("text " + escape(shown))
        return tty.finish(shown)

    def check(self, tty):
        rows, row, cols = expected(self.ed, self.view, self.cols)
        rows += [""] * (self.rows - len(rows))
        for k, t in enumerate(tty.terminals):
            got = [t.row(r) for r in range(self.rows)]
            if t.cursor() == (row, cols[k]) and all(t.same(g, w) for g, w in zip(got, rows)):
                continue
            print("%s: cursor %s, expected %s" % (type(t).__name__, t.cursor(), (row, cols[k])))
            for g, w in zip(got, rows):
                print("   " if t.same(g, w) else ">> ", g, "|", w, "" if t.same(g, w) else (ascii(g), ascii(w)))
            print("text", ascii(self.ed.text), "cursor", self.ed.cursor)
            raise AssertionError("another screen")


class Terminal:
    """The editor in a pseudo-terminal, with three terminals that get what it writes."""

    def __init__(self, rows, cols):
        self.terminals = [t(rows, cols) for t in TERMINALS]
        self.log, self.seen, self.fed = b"", 0, 0
        pid, self.fd = pty.fork()
        if not pid:
            while os.get_terminal_size(0).columns != cols:
                time.sleep(0.001)
            os.environ["TERM"] = "xterm"
            os.chdir(ROOT)
            os.execv("build/test_moe", ["build/test_moe", "--editor"])
        self.pid = pid
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        self.expect(b"\x1b[?25h")

    def expect(self, what):
        while True:
            i = self.log.find(what, self.seen)
            if i >= 0:
                self.seen = i + len(what)
                return
            assert select.select([self.fd], [], [], 20)[0], (what, self.log[self.seen :])
            self.log += os.read(self.fd, 65536)

    def enter(self, s):
        os.write(self.fd, s.encode() + b"\r")
        self.expect(b"=" + s.encode() + b"\r\n")
        self.expect(b"\x1b[?2004h")

    def send(self, s):
        os.write(self.fd, s.encode() + b"\t")
        self.expect(SYNC)
        self.expect(b"\x1b[?25h")
        text = self.log[self.fed : self.seen].decode()
        self.fed = self.seen
        for t in self.terminals:
            t.feed(text)

    def finish(self, shown):
        os.write(self.fd, b"\r")
        self.expect(b"=" + shown.encode() + b"\r\n")
        os.write(self.fd, b"\x04")
        self.expect(b"=EOF")
        os.close(self.fd)
        os.waitpid(self.pid, 0)


def escape(s):
    """Controls, backslashes and marks of direction as \\xNN."""
    out = ""
    for c in s:
        hide = c in "\\\u200e\u200f" or unicodedata.category(c) == "Cc"
        out += "".join("\\x%02x" % b for b in c.encode()) if hide else c
    return out


def main():
    body, clusters, chars, failed = [], set(), set(), 0
    other = "--seed" in sys.argv
    seed = int(sys.argv[sys.argv.index("--seed") + 1]) if other else SEED
    for i in range(SEQUENCES):
        rng = random.Random(seed * 1000 + i)
        s = Sequence(rng, SIZES[i % 2])
        tty = Terminal(s.rows, s.cols)
        try:
            s.run(tty)
        except AssertionError as e:
            failed += 1
            print("sequence %d: %s" % (i, ascii(e.args)), *s.dump, sep="\n  ", flush=True)
        body += s.dump
        clusters |= s.clusters
        chars |= s.chars
    if failed:
        sys.exit("%d of %d sequences differ" % (failed, SEQUENCES))
    if other:
        return print("no differences")
    head = ["# Written by tests/oracle/gen_screen.py, which says what the lines mean."]
    for c in sorted(chars):
        a, b = widths(c)[:2]
        if (a, b) != (1, 1):
            head.append("width %x %d %d" % (ord(c), a, b))
    head += ["cluster %s %d" % (escape(c), columns(c)) for c in sorted(clusters)]
    text = "\n".join(head + body) + "\n"
    if "--check" in sys.argv:
        sys.exit(0 if OUT.read_bytes() == text.encode() else "%s differs" % OUT)
    OUT.write_bytes(text.encode())
    print("%s: %d bytes" % (OUT, len(text.encode())))


if __name__ == "__main__":
    main()
