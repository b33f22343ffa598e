"""Chat templates that loop, build huge texts, reach for Python, or are no templates."""

from __future__ import annotations

from random import Random

from tests.helpers.gguf_files import CHAT_TEMPLATE

_FRAGMENTS = [
    "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "{% for a in messages %}{% for b in messages %}{{ a.content * 1000000 }}{% endfor %}{% endfor %}",
    "{{ 'x' * 1000000000 }}",
    "{{ [0] * 1000000000 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ (2 ** 255) * (2 ** 255) }}",
    "{% set ns = namespace(x='ab') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=['a']) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=['a']) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set n = namespace(x={}) %}{% for i in range(64) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}"
    "{{ n.x | tojson }}",
    "{{ '%*d' % (400000000, 1) }}",
    "{{ '{0:{1[0]}}'.format(1, [400000000]) }}",
    "{{ '%*d' | format(400000000, 1) }}",
    "{{ range(1000) | list | tojson(indent=1000000) }}",
    "{{ range(1000) | list | tojson(separators=('x' * 100000, ':')) }}",
    "{% set x = 'a' * 1000 * 2000 %}" + "".join(f"{{% set a{i} = x.upper() %}}" for i in range(200)),
    "{% set x = 'a' * 1000 * 2000 %}" + "".join(f"{{% set a{i} = x[1:] %}}" for i in range(200)),
    "{% set x = 'a ' * 1000 * 1000 %}" + "".join(f"{{% set a{i} = x.split() %}}" for i in range(20)),
    "{% set x = 'a' * 1000 * 2000 %}{{ x.strip('b' * 1000 * 500 ~ 'a') }}",
    "{% set l = [[0]] * 100000 %}{{ l | sum(start=[]) }}",
    "{{ strftime_now('%1000000d' * 1000) }}",
    "{{ a }}" * 20_000,
    "{{ a" + " ~ a" * 20_000 + " }}",
    ("{% for a in b %}" * 18 + "x" + "{% endfor %}" * 18) * 50,
    "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}{% call m() %}x{% endcall %}{% endcall %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ (messages | first | attr('__class__')) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a' | indent(1000000000) }}",
    "{{ ('a' * 1000) | wordwrap(1) | wordwrap(1, wrapstring='b' * 1000) }}",
    "{{ 'aaaa' | replace('', 'b' * 100000) }}",
    "{{ range(1000000000) | list }}",
    "{{ range(100000) | map('string') | join(',' * 100000) }}",
    "{{ messages | tojson(indent=100000000) }}",
    "{{ ('x' * 100000) | urlize }}",
    "{{ ('<' * 100000) | striptags }}",
    "{{ ('a ' * 100000) | title | trim | wordcount }}",
    "{{ messages | pprint | upper | forceescape }}",
    "{{ messages | batch(1000000000, 'x') | list }}",
    "{{ messages | slice(1000000000) | list }}",
    "{{ messages | groupby('role') | list | string }}",
    "{{ messages | sort(attribute='content') | map(attribute='role') | list }}",
    "{{ messages | sum(attribute='content') }}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception('\x1b[31m' ~ 'no\nway' * 1000) }}",
    "{{ strftime_now('%Y' * 100000) }}",
    "{{ strftime_now('\ud800') }}",
    "{{ strftime_now(1) }}",
    "{{ messages[99].role }}",
    "{{ undefined_thing.x.y }}",
    "{{ messages | nosuchfilter }}",
    "{{ 1 is nosuchtest }}",
    "{{ 1 / 0 }}",
    "{{ 'a' + 1 }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 1}) }}",
    "{% include 'other' %}",
    "{% extends 'other' %}",
    "{% import 'other' as o %}",
    "{% block a %}{{ self.a() }}{% endblock %}",
    "{% set x = self %}{{ x }}",
    "{% do 1 %}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% for x in messages %}{% continue %}{% endfor %}{% break %}",
    "{% generation %}{{ messages }}{% endgeneration %}",
    "{% filter upper %}{% for i in range(9999) %}{{ i }}{% endfor %}{% endfilter %}",
    "{% set x %}{% for i in range(99999) %}yyyyyyyyyyyyyyyyyyyy{% endfor %}{% endset %}{{ x * 1000 }}",
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "{{ " + "not " * 5000 + "1 }}",
    "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "{{ 1" + " + 1" * 5000 + " }}",
    "{{ " + "-" * 5000 + "1 }}",
    "{{ x" + ".a" * 5000 + " }}",
    "{% if 1 %}" * 150 + "{% endif %}" * 150,
    "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
    "{{ " + "9" * 5000 + " }}",
    "{{ 1e400 }}{{ -1e400 | int }}",
    "{{ '\ud800' }}",
    "\ud800",
    "\x00{{ messages }}\x00",
    "{% raw %}" + "x" * 100_000 + "{% endraw %}",
    "{{ messages",
    "{% for",
    "{#" * 1000,
    "{{ {{ }} }}",
    "{% if %}",
    "{% endfor %}",
    "{% macro %}",
    "{{ x if y else }}",
    "{{ messages | map('upper') | map('lower') | list }}",
    "{{ dict(a=1) | xmlattr }}{{ {'a b': 1} | xmlattr }}",
    "{{ [1, 2] | random }}{{ 'abc' | list | last }}",
    "{{ (1, 2, 3) | max ** 3 }}",
    "{{ lipsum(n=1000) }}",
    "{{ joiner(',')() }}{{ namespace(a=1).a }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ 'x'.zfill(1000000000) }}{{ 'x'.ljust(1000000000) }}",
    "{{ ('x' * 10000).split('') }}",
    "{{ ('\t' * 10000).expandtabs(100000) }}",
    "{{ 'ab'.encode('utf-8').hex(',') }}",
    "{{ 'a'.join(range(1000000)) }}",
    "{{ (2 ** 250).to_bytes(1000000000, 'big') }}",
    "{{ 'x'.translate({120: 'y' * 10000}) }}",
    "{{ messages | string | reverse | list | join | length }}",
    "{{ '' | format(*([1] * 100000)) }}",
    "{{ 1 << 1000000000 }}",
    "{{ '1' * 100000 | int }}{{ ('1' * 5000) | int }}{{ ('1' * 100000) | float }}",
    "{{ '0x' | int(base=36) }}{{ 10 | filesizeformat }}{{ 1.5 | round(100000, 'ceil') }}",
]  # fmt: skip
_TOKENS = [
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "{%-",
    "-%}",
    "for",
    "endfor",
    "if",
    "in",
    "|",
    "~",
    "'",
    '"',
    "(",
    ")",
    "\n",
]


def hostile_template(rng: Random) -> str:
    """Hostile pieces by themselves or within a template that works, or a working one that is damaged."""
    kind = rng.randrange(5)
    if kind == 0:
        return _damaged(CHAT_TEMPLATE, rng)
    if kind == 1:
        return _damaged(rng.choice(_FRAGMENTS), rng)
    pieces = [rng.choice(_FRAGMENTS) for _ in range(rng.choice([1, 1, 2, 4]))]
    if kind == 2:
        pieces.insert(rng.randrange(len(pieces) + 1), CHAT_TEMPLATE)
    return rng.choice(["", " ", "\n"]).join(pieces)


def _damaged(source: str, rng: Random) -> str:
    text = source
    for _ in range(rng.choice([1, 2, 5])):
        at = rng.randrange(len(text) + 1)
        how = rng.randrange(4)
        if how == 0:
            text = text[:at] + text[at + rng.choice([1, 2, 10]) :]
        elif how == 1:
            text = text[:at] + rng.choice(_TOKENS) + text[at:]
        elif how == 2:
            text = text[:at] + chr(rng.choice([*range(128), 0xD800, 0x2028, 0xFDD0, 0x10FFFF])) + text[at:]
        else:
            start = rng.randrange(len(text) + 1)
            text = text[:at] + text[start : start + 20] + text[at:]
    return text
