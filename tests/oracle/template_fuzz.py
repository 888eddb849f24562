"""Random templates for gen_templates.py --fuzz: expressions of all filters, methods, operators and formats."""
import random

WORDS = ["", "a", "ab", "Hello World", "hello world", "  padded \t", "a,b,,c", "x=1;y=2", "line1\nline2\r\nline3", "\n\n",
         "é", "Größe ß", "ΑΣ ΟΔΟΣ σς", "ﬁn ǅ İi", "日本語 テスト", "٣٤", "²½Ⅷ", "a\tb\tc", "<b>bold</b> &amp; 'q' \"d\"", "it's", "-42",
         "+7", "3.14", "1e3", "0x1F", "0b101", "0o17", "1_000", "nan", "-inf", "%s", "%d%%", "{}", "{0}", "__x__", "snake_case",
         "well-known state-of-the-art", "a--b", "A title-case Word", "tÉst", "e\u0301", "\u00a0x\u2003", "🙂", "abcabcabc",
         "the quick brown fox jumps over the lazy dog, twice-over", "<!-- c --><p>t\n  x</p>", "&lt;&#65;&#x42;&copy &notit; &eacute;"]
PARTS = ["", "a", "b", "l", " ", "o", ",", "ab", "lo", "é", "\n", "-", "x", "<", "1", "σ"]
INTS = [0, 1, 2, 3, 5, 7, 10, 12, 42, 97, 255, 1000, 12345, 65535, 1234567, 1234567890, 2 ** 31, 2 ** 53 + 1, 2 ** 63 - 1]
FLOATS = ["0.0", "1.0", "0.5", "1.5", "2.5", "3.14159", "0.1", "1e-5", "1e-4", "123456.789", "1e15", "1e16", "1e22", "1e100", "2.5e-10",
          "1234567.891", "99.5", "0.00001234", "1_0.5", "1e3", "(inf|float)", "(nan|float)", "5e-324", "1.7e308", "9.995", "0.045"]


class Gen:
    def __init__(self, seed):
        self.r = random.Random(seed)

    def pick(self, *options):
        """One of the options; called if it is a function."""
        o = self.r.choice(options)
        return o() if callable(o) else o

    def quote(self, s):
        s = s.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
        return "'" + s + "'"

    def chars(self):
        return "".join(self.r.choice("abcXYZ019 _-.,é<>&'\"\t\nßΣσǆ😀²٣") for _ in range(self.r.randrange(12)))

    def word(self):
        return self.quote(self.r.choice(WORDS) if self.r.random() < 0.8 else self.chars())

    def str(self):
        x = self.r.random()
        if x < 0.08:
            return "(" + self.word() + "|safe)"
        if x < 0.12:
            return "(" + self.word() + "|e)"
        if x < 0.16:
            return "(" + self.word() + " ~ " + self.word() + ")"
        return self.word()

    def part(self):
        return self.quote(self.r.choice(PARTS)) if self.r.random() < 0.93 else "(" + self.quote(self.r.choice(PARTS)) + "|safe)"

    def small(self):
        if self.r.random() < 0.02:
            return self.pick("none", "'a'", "1.0")
        return self.pick(*map(str, range(-4, 14)), "true", "20", "30")

    def int(self):
        v = str(self.r.choice(INTS))
        x = self.r.random()
        if x < 0.05:
            return self.pick("0x1F", "0b1011", "0o17", "0XfF", "1_000", "0x_f", "00", "0_0", "true", "false")
        return "-" + v if x < 0.3 else v

    def float(self):
        v = self.r.choice(FLOATS)
        return "(-" + v + ")" if self.r.random() < 0.3 else v

    def number(self):
        return self.pick(self.int, self.float)

    def scalar(self):
        return self.pick(self.str, self.str, self.int, self.float, "none", "true", "missing", "false")

    def key(self):
        return self.pick(self.word, self.word, self.small, "none", "1.5", "'a'", "'b'")

    def list(self, item=None):
        kind = self.r.random()
        items = [(item or self.scalar)() for _ in range(self.r.randrange(6))]
        if kind < 0.15:
            return "(" + "".join(i + "," for i in items) + ")"
        return "[" + ", ".join(items) + "]"

    def dict(self):
        return "{" + ", ".join(self.key() + ": " + self.scalar() for _ in range(self.r.randrange(5))) + "}"

    def deep(self, depth=3):
        if depth == 0 or self.r.random() < 0.3:
            return self.pick(self.str, self.number, "none", "true", self.quote(" ".join(self.r.choice(WORDS) for _ in range(5))))
        items = [self.deep(depth - 1) for _ in range(self.r.randrange(6))]
        kind = self.r.randrange(3)
        if kind == 0:
            return "[" + ", ".join(items) + "]"
        if kind == 1:
            return "(" + "".join(i + "," for i in items) + ")"
        return "{" + ", ".join(self.key() + ": " + i for i in items) + "}"

    def seq(self):
        return self.pick(self.list, self.list, self.dict, self.str, lambda: self.list(self.small), lambda: self.list(self.word),
                         lambda: f"range({self.small()}, {self.small()})", lambda: self.dict() + ".items()",
                         lambda: self.dict() + ".keys()", lambda: self.dict() + ".values()", "missing")

    def any(self):
        if self.r.random() < 0.15:
            return "(" + self.expression() + ")"
        return self.pick(self.scalar, self.scalar, self.number, self.seq, self.deep)

    def records(self):
        keys = ["a", "b", "n"]
        return "[" + ", ".join("{" + ", ".join(f"'{k}': {self.pick(self.small, self.word, self.part)}" for k in keys[:self.r.choice([1, 2, 3, 3])])
                               + "}" for _ in range(self.r.randrange(5))) + "]"

    # ---- formats ----

    def percent_spec(self):
        s = "%" + ("(%s)" % self.pick("a", "b") if self.named else "")
        s += "".join(self.r.choice("-+ #0") for _ in range(self.r.choice([0, 0, 1, 1, 2])))
        width = self.r.choice(["", "", "5", "12", "3", "*" if self.r.random() < 0.3 else "8"])
        self.stars += width == "*"
        s += width
        if self.r.random() < 0.4:
            precision = self.r.choice(["", "0", "1", "2", "3", "10", "*" if self.r.random() < 0.3 else "5"])
            self.stars += precision == "*"
            s += "." + precision
        return s + self.r.choice("ddddiuoxXeEfFgGcrsas%" if self.r.random() < 0.97 else "lhyzb(")

    def percent(self):
        self.named = self.r.random() < 0.2
        f, args = "", []
        for _ in range(self.r.choice([1, 1, 1, 2, 3])):
            self.stars = 0
            f += self.r.choice(["", "x", "é:", "[", "<"]) + self.percent_spec() + self.r.choice(["", "]", " "])
            args += [self.small() for _ in range(self.stars)] + [self.pick(self.number, self.number, self.scalar, self.any)]
        fmt = self.pick(*[self.quote(f)] * 6, "(" + self.quote(f) + "|safe)")
        if self.named:
            values = "{'a': " + self.pick(self.number, self.scalar) + ", 'b': " + self.scalar() + "}"
            return self.pick(fmt + " % " + values, fmt + "|format(a=" + self.number() + ", b=" + self.scalar() + ")")
        if self.r.random() < 0.05:
            args.append(self.scalar())
        if self.r.random() < 0.3:
            return fmt + "|format(" + ", ".join(args) + ")"
        if len(args) == 1 and self.r.random() < 0.5:
            return fmt + " % " + args[0]
        return fmt + " % (" + "".join(a + ", " for a in args) + ")"

    def spec(self, number):
        s = ""
        if self.r.random() < 0.4:
            s += self.r.choice(["", "", "*", "0", "é", " ", "-", "{{"[:0]]) + self.r.choice("<>^=" if number else "<>^<>^=")
        if self.r.random() < (0.3 if number else 0.03):
            s += self.r.choice("+- ")
        if self.r.random() < 0.05:
            s += "z"
        if self.r.random() < (0.15 if number else 0.02):
            s += "#"
        if self.r.random() < 0.15:
            s += "0"
        if self.r.random() < 0.6:
            s += str(self.r.choice([0, 1, 2, 5, 8, 12, 20, 33]))
        if self.r.random() < (0.25 if number else 0.03):
            s += self.r.choice(",_")
        if self.r.random() < 0.3:
            s += "." + self.r.choice(["0", "1", "2", "3", "5", "6", "10", "17", "30", ""])
        if self.r.random() < 0.6:
            s += self.r.choice("bcdoxXneEfFgG%" if number else "s")
        if self.r.random() < 0.02:
            s += self.r.choice("dyq,")
        return s

    def format(self):
        f, args, kw = "", [], {}
        auto = self.r.random() < 0.7
        for i in range(self.r.choice([1, 1, 1, 2, 3])):
            number = self.r.random() < 0.7
            v = self.pick(self.number, self.number, self.int, "true") if number else self.pick(self.str, self.str, self.scalar, self.any)
            field = "" if auto else str(i)
            if self.r.random() < 0.1:
                field = self.r.choice("kw")
                kw[field] = v
            else:
                args.append(v)
            x = self.r.random()
            if x < 0.04:
                field += self.r.choice(["[0]", "[-1]", "[a]", ".a", ".real", ".__class__", "[0][0]", ".upper", "[", ".", "[]", "[0]x"])
            elif x < 0.12:
                field += "!" + self.r.choice("rsaxx"[:4])
            spec = self.spec(number and "!" not in field)
            if self.r.random() < 0.05:
                spec = spec[:1] + "{}"
                args.append(self.small())
            elif self.r.random() < 0.02:
                spec += self.r.choice("{}")
            f += self.r.choice(["", "", "x", "{{", "}}", "é"]) + "{" + field + (":" + spec if spec or self.r.random() < 0.1 else "") + "}"
        if self.r.random() < 0.02:
            f += self.r.choice("{}")
        given = args + [f"{k}={v}" for k, v in kw.items()]
        fmt = self.pick(*[self.quote(f)] * 8, "(" + self.quote(f) + "|safe)")
        if kw and not args and self.r.random() < 0.5:
            return fmt + ".format_map({" + ", ".join(f"'{k}': {v}" for k, v in kw.items()) + "})"
        return fmt + ".format(" + ", ".join(given) + ")"

    # ---- methods, filters, tests ----

    def method(self):
        s, p, n = self.str(), self.part, self.small
        bounds = self.pick("", "", lambda: ", " + n(), lambda: ", " + n() + ", " + n(), lambda: ", none, " + n())
        name = self.r.choice(["upper", "lower", "title", "capitalize", "swapcase", "casefold", "strip", "lstrip", "rstrip", "split", "rsplit",
                              "splitlines", "replace", "startswith", "endswith", "removeprefix", "removesuffix", "find", "rfind", "index",
                              "rindex", "count", "center", "ljust", "rjust", "zfill", "partition", "rpartition", "join", "expandtabs",
                              "translate", "maketrans", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower",
                              "isnumeric", "isprintable", "isspace", "istitle", "isupper", "number", "dict", "list"])
        if name in ("strip", "lstrip", "rstrip"):
            return f"{s}.{name}({self.pick('', p, 'none', self.word)})"
        if name in ("split", "rsplit"):
            return f"{s}.{name}({self.pick('', p, 'none', lambda: p() + ', ' + n(), lambda: 'none, ' + n(), lambda: 'maxsplit=' + n())})"
        if name == "splitlines":
            return f"{s}.splitlines({self.pick('', 'true', 'keepends=true', '0')})"
        if name == "replace":
            return f"{s}.replace({p()}, {self.pick(p, self.word)}{self.pick('', lambda: ', ' + n())})"
        if name in ("startswith", "endswith"):
            arg = self.pick(p, p, lambda: f"({p()}, {p()})", "()", n)
            return f"{s}.{name}({arg}{bounds})"
        if name in ("removeprefix", "removesuffix", "partition", "rpartition"):
            return f"{s}.{name}({p()})"
        if name in ("find", "rfind", "index", "rindex", "count"):
            return f"{s}.{name}({p()}{bounds})"
        if name in ("center", "ljust", "rjust"):
            return f"{s}.{name}({n()}{self.pick('', lambda: ', ' + p())})"
        if name in ("zfill", "expandtabs"):
            return f"{s}.{name}({self.pick(n, n, '' if name == 'expandtabs' else '9')})"
        if name == "join":
            return f"{self.part()}.join({self.pick(lambda: self.list(self.word), lambda: self.list(self.str), self.seq)})"
        if name in ("translate", "maketrans"):
            table = self.pick(lambda: f"''.maketrans({self.quote('abc')}, {self.quote('xéz')})", lambda: f"''.maketrans('ab', 'ba', {p()})",
                              lambda: "{97: 'X', 98: none, 108: 233, 111: 'oo'}", lambda: "''.maketrans({'a': 'b', 'l': none})",
                              lambda: "['x'] * 200", lambda: f"''.maketrans({p()}, {p()})")
            return f"{s}.translate({table})" if name == "translate" else table
        if name == "number":
            return self.pick(lambda: f"({self.int()}).{self.pick('bit_length()', 'bit_count()', 'conjugate()', 'as_integer_ratio()', 'real', 'imag', 'numerator', 'denominator')}",
                             lambda: f"({self.float()}).{self.pick('is_integer()', 'conjugate()', 'hex()', 'real', 'imag', 'as_integer_ratio()')}")
        if name == "dict":
            d = self.dict()
            return d + self.pick(lambda: f".get({self.key()})", lambda: f".get({self.key()}, {self.scalar()})", ".keys()", ".values()", ".items()", ".copy()",
                                 lambda: f"[{self.key()}]", ".a", lambda: f".fromkeys({self.list(self.key)}, 1)", lambda: f".pop({self.key()})")
        if name == "list":
            return self.list() + self.pick(lambda: f".index({self.scalar()})", lambda: f".count({self.scalar()})", ".copy()", lambda: f"[{n()}]", ".append(1)",
                                           lambda: f".index({self.scalar()}, {n()})", lambda: f"[{n()}:{n()}]", lambda: f"[::{n()}]")
        return f"{s}.{name}()"

    def args(self, *options):
        """A call's arguments: some of the options, by position while in order, then by name."""
        out, named = [], False
        for name, value in options:
            if self.r.random() < 0.55:
                named = True
                continue
            v = value() if callable(value) else value
            out.append(f"{name}={v}" if named or self.r.random() < 0.1 else v)
            named = named or "=" in out[-1][:15] and out[-1].startswith(name)
        return "(" + ", ".join(out) + ")" if out or self.r.random() < 0.2 else ""

    def filter(self, depth=0):
        n, p, b = self.small, self.part, lambda: self.pick("true", "false", "1", "none")
        attr = lambda: self.pick("'a'", "'b'", "'n'", "'a,b'", "'b,n'", "'a.b'", "0", "none", "'nope'")
        table = {
            "abs": (self.number, ()), "attr": (self.any, (("name", lambda: self.pick("'real'", "'a'", "'upper'")),)),
            "batch": (self.seq, (("linecount", n), ("fill_with", self.scalar))), "slice": (self.seq, (("slices", n), ("fill_with", self.scalar))),
            "capitalize": (self.scalar, ()), "lower": (self.scalar, ()), "upper": (self.scalar, ()), "title": (self.scalar, ()),
            "center": (self.scalar, (("width", n),)), "default": (self.scalar, (("default_value", self.scalar), ("boolean", b))),
            "dictsort": (self.dict, (("case_sensitive", b), ("by", lambda: self.pick("'key'", "'value'")), ("reverse", b))),
            "escape": (self.scalar, ()), "e": (self.any, ()), "forceescape": (self.any, ()), "safe": (self.any, ()), "string": (self.any, ()),
            "filesizeformat": (lambda: self.pick(self.number, "'1e3'", "999999"), (("binary", b),)),
            "first": (self.seq, ()), "last": (self.seq, ()), "length": (self.any, ()), "count": (self.seq, ()), "list": (self.seq, ()),
            "float": (self.scalar, (("default", self.scalar),)),
            "int": (self.scalar, (("default", self.scalar), ("base", lambda: self.pick("0", "2", "8", "10", "16", "36", "1", "40")))),
            "groupby": (self.records, (("attribute", lambda: self.pick("'a'", "'b'", "'n'", "0")), ("default", self.small), ("case_sensitive", b))),
            "indent": (self.str, (("width", lambda: self.pick(n, "'> '", "('<'|safe)")), ("first", b), ("blank", b))),
            "items": (self.dict, ()), "join": (self.seq, (("d", lambda: self.pick(p, "1", "none")),)),
            "max": (self.seq, (("case_sensitive", b),)), "min": (self.seq, (("case_sensitive", b),)),
            "pprint": (self.deep, ()), "reverse": (self.seq, ()), "replace": (self.scalar, (("old", p), ("new", self.word), ("count", n))),
            "round": (self.number, (("precision", n), ("method", lambda: self.pick("'common'", "'ceil'", "'floor'", "'x'")))),
            "sort": (lambda: self.pick(self.records, self.seq), (("reverse", b), ("case_sensitive", b), ("attribute", attr))),
            "sum": (lambda: self.list(self.number), (("attribute", lambda: self.pick("none", "'a'")), ("start", self.number))),
            "striptags": (self.any, ()), "tojson": (self.deep, (("ensure_ascii", b), ("indent", lambda: self.pick("2", "none", "0")))),
            "trim": (self.scalar, (("chars", lambda: self.pick(p, "none")),)),
            "truncate": (self.str, (("length", n), ("killwords", b), ("end", p), ("leeway", n))),
            "unique": (self.seq, (("case_sensitive", b),)), "urlencode": (lambda: self.pick(self.scalar, self.dict), ()),
            "wordcount": (self.scalar, ()), "xmlattr": (self.dict, (("autospace", b),)),
            "wordwrap": (lambda: self.quote(" ".join(self.r.choice(WORDS) for _ in range(4))),
                         (("width", n), ("break_long_words", b), ("wrapstring", lambda: self.pick(p, "'|'", "none")), ("break_on_hyphens", b))),
            "map": (self.seq, ()), "select": (self.seq, ()), "selectattr": (self.records, ()),
        }
        name = self.r.choice(list(table))
        operand, options = table[name]
        v = self.filter(depth + 1) if depth < 2 and self.r.random() < 0.15 else operand()
        if name == "map":
            arg = self.pick("'upper'", "'string'", "'length'", "attribute='a'", "attribute=0", "'int', 5", "'replace', 'a', 'b'", "'trim'",
                            "attribute='a', default='z'", "'default', 'q'", "'first'", "'e'")
            return f"{v}|map({arg})|list"
        if name in ("select", "selectattr"):
            test = self.pick("", "'odd'", "'string'", "'none'", "'defined'", "'eq', 1", "'in', [1, 'a']", "'gt', 2", "'number'", "'lower'")
            name = self.pick(name, name.replace("select", "reject"))
            return f"{v}|{name}(" + ", ".join(filter(None, [self.pick("'a'", "'b'") if "attr" in name else "", test])) + ")|list"
        first = [f"{operand_arg[0]}" for operand_arg in ()]
        required = {"attr": 1, "batch": 1, "slice": 1, "groupby": 1, "replace": 2}.get(name, 0)
        positional = first + [(o[1]() if callable(o[1]) else o[1]) for o in options[:required]]
        rest = self.args(*options[required:])[1:-1]
        arguments = ", ".join(filter(None, [", ".join(positional), rest]))
        call = f"{v}|{name}" + (f"({arguments})" if arguments or self.r.random() < 0.1 else "")
        return call + "|list" if name in ("batch", "slice", "unique", "items", "reverse") else call

    def test(self):
        name = self.pick("boolean", "callable", "defined", "undefined", "divisibleby 3", "divisibleby(0)", "even", "odd", "float", "integer",
                         "iterable", "mapping", "none", "number", "sequence", "string", "true", "false", "lower", "upper", "escaped",
                         "filter", "test", lambda: "eq(" + self.any() + ")", lambda: "in(" + self.seq() + ")", lambda: "lt(" + self.scalar() + ")",
                         lambda: "ge(" + self.scalar() + ")", "sameas none", "sameas true")
        return f"({self.any()}) is {self.pick('', 'not ')}{name}"

    def operator(self):
        op = self.pick("+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", ">", "<=", ">=", "in", "not in", "and", "or")
        a, b = self.pick((self.number, self.number), (self.scalar, self.scalar), (self.any, self.any), (self.list, self.list), (self.seq, self.small),
                         (self.scalar, self.seq))
        if op == "*":
            b = self.small
        if self.r.random() < 0.05:
            return f"{self.small()} ** {self.small()}"
        return f"({a()}) {op} ({b()})"

    def subscript(self):
        return f"({self.seq()})[{self.pick(self.small, self.key, lambda: self.small() + ':' + self.small(), lambda: '::' + self.small(), ':')}]"

    def statement(self):
        s, e = self.seq, self.expression
        block = self.r.choice("abc")
        return self.pick(
            lambda: "{% for x in " + s() + " %}{{ [x] }}{{ loop.index }}{{ loop.last }}{{ loop.length }};{% else %}none{% endfor %}",
            lambda: "{% for x in " + s() + " if x %}{{ [x, loop.previtem, loop.nextitem] }}{% endfor %}",
            lambda: "{% set v = " + e() + " %}{{ [v] }}{% set w %}" + "{{ v }}{% endset %}{{ [w] }}",
            lambda: "{% filter upper|trim %} {{ " + e() + " }}{% endfilter %}",
            lambda: "{% set t = 1 %}{% for x in [1, 2] %}{% block " + block + self.pick("", " scoped") + " %}{{ x }}{{ t }}{{ " + e() + " }}{% endblock %}{% endfor %}{{ self." + block + "() }}",
            lambda: "{% autoescape " + self.pick("false", "0", "none") + " %}{% set q = " + e() + " %}{{ q }}{% endautoescape %}{{ q }}",
            lambda: "{% macro m(a, b=" + self.scalar() + ") %}{{ [a, b] }}{% endmacro %}{{ m(" + e() + ") }}{{ [m(1)] }}",
            lambda: "{% if " + e() + " %}y{% else %}n{% endif %}",
            lambda: "{% for x in " + s() + " %}{{ loop }}{{ loop.cycle(" + self.scalar() + ", 1) }}{{ loop.changed(x) }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
            lambda: "{% print " + e() + ", " + self.scalar() + " %}",
            lambda: "{% set n = namespace(a=" + e() + ") %}{% set n.b = n.a %}{{ [n.b, n.c, n['a']] }}",
            lambda: "{% for k, v in " + self.dict() + "|dictsort %}{{ [k, v] }}{% endfor %}",
            lambda: "{% set c = cycler(" + e() + ", 1) %}{{ [c.next(), c.current, c.next()] }}{% set j = joiner(" + self.part() + ") %}{{ [j(), j()] }}",
            lambda: "{% call(q) m2(" + self.scalar() + ") %}{{ [q] }}{% endcall %}",
            lambda: "{% macro m2(a) %}{{ caller(a) }}{{ varargs }}{{ kwargs }}{% endmacro %}{% call(q) m2(" + e() + ", " + self.scalar() + ", z=1) %}{{ [q] }}{% endcall %}",
            lambda: "{% with a = " + e() + " %}{{ [a] }}{% endwith %}{{ a }}")

    VARS = {"inf": "inf", "nan": "nan"}  # as constants, jinja2 cannot compile these numbers

    def expression(self):
        return self.pick(self.percent, self.percent, self.format, self.format, self.method, self.method, self.filter, self.filter, self.filter,
                         self.test, self.operator, self.subscript)

    def template(self):
        x = self.r.random()
        if x < 0.08:
            return self.statement()
        e = self.expression()
        return "{{ [" + e + "] }}" if x < 0.8 else "{{ " + e + " }}"
