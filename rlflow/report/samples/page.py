"""Samples as one page that works offline, with its script and its colours within it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from string import Template

from rlflow.report.samples.colours import COLOURS, colour_scale
from rlflow.report.samples.joined import RESPONSE, RecordedSample, Samples
from rlflow.report.samples.text import Decode, header, legend

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>samples of $run</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>$style</style></head><body>
<main><h1>Samples of $run</h1><p class="about">$about</p>
<form id="look" role="search"><label>Find <input id="find" type="search"></label>
<label>Order <select id="order"><option value="">as given</option>$orders</select></label>
<label>Colour <select id="colour">$colours</select></label>
<output id="count" aria-live="polite"></output></form>
<p class="about" id="legend">$legend</p>
<div id="samples">$samples</div></main>
<script>$script</script></body></html>
""")
STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1b1f24;--dim:#57606a;--line:#d0d7de;
--good:46,160,67;--bad:209,36,47}
@media(prefers-color-scheme:dark){:root{--page:#0d1117;--ink:#e6edf3;--dim:#9aa4af;--line:#30363d}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1100px;margin:0 auto;padding:24px}
h1{font-size:22px;margin:0 0 4px}.about{color:var(--dim);margin:0 0 12px}
form{display:flex;flex-wrap:wrap;gap:12px 20px;align-items:center;margin:0 0 8px;
position:sticky;top:0;padding:10px 0;background:var(--page);border-bottom:1px solid var(--line)}
input,select{font:inherit;color:inherit;background:var(--page);border:1px solid var(--line);
border-radius:6px;padding:3px 8px}
article{border:1px solid var(--line);border-radius:8px;padding:10px 14px;margin:0 0 10px}
article h2{font-size:14px;margin:0;font-weight:600;font-variant-numeric:tabular-nums}
h2 span{margin-right:14px;white-space:nowrap}h2 .cut{color:rgb(var(--bad))}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:6px 0 0;font:13px/1.7 ui-monospace,monospace}
pre.prompt{color:var(--dim)}
pre i{font-style:normal;border-radius:3px}
@media print{form{display:none}article{break-inside:avoid}}
"""
SCRIPT = """
'use strict';
const box=document.getElementById('samples'),all=[...box.children];
const get=id=>document.getElementById(id);
const legends=JSON.parse(get('look').dataset.legends||'{}');
function paint(){const what=get('colour').value;get('legend').textContent=legends[what]||'';
 for(const t of box.querySelectorAll('i')){const v=Number((t.getAttribute('data-'+what))||0);
 t.style.background=Math.abs(v)<0.04?'':`rgba(var(--${v>0?'good':'bad'}),${Math.abs(v)*0.45})`;}}
function look(){const word=get('find').value.toLowerCase(),key=get('order').value;let n=0;
 const name=key.replace('-',''),sign=key[0]==='-'?-1:1;
 const number=e=>e.dataset[name]===undefined?Infinity:sign*Number(e.dataset[name]);
 const order=key?[...all].sort((a,b)=>number(a)-number(b)):all;
 for(const e of order){e.hidden=!e.textContent.toLowerCase().includes(word);n+=!e.hidden;
 box.append(e);}
 get('count').textContent=`${n} of ${all.length} shown`;}
get('find').addEventListener('input',look);get('order').addEventListener('change',look);
get('colour').addEventListener('change',paint);
get('look').addEventListener('submit',e=>e.preventDefault());look();paint();
"""
KEYS = ("reward", "advantage", "length", "gap", "iteration")


def samples_page(
    samples: Samples,
    found: int,
    shown: Sequence[RecordedSample],
    *,
    order: str,
    colour: str,
    decode: Decode | None,
) -> str:
    """The page of some samples; `colour` is what tokens are coloured by at first."""
    colours = [what for what in COLOURS if any(s.per_token(what) for s in shown)]
    first = colour if colour in colours else next(iter(colours), colour)
    keys = [key for key in KEYS if any(s.number(key) is not None for s in shown)]
    most = max((abs(v) for s in shown for v in s.per_token("advantage") or ()), default=0.0)
    return PAGE.substitute(
        run=html.escape(samples.run.name),
        about=html.escape(header(samples, found, len(shown), order)),
        style=STYLE,
        script=SCRIPT,
        orders="".join(
            f'<option value="{sign}{key}">{key}, {word} first</option>'
            for key in keys
            for sign, word in (("", "lowest"), ("-", "highest"))
        ),
        colours="".join(
            f"<option{' selected' if what == first else ''}>{what}</option>" for what in colours
        ),
        legend=html.escape(legend(first)),
        samples="\n".join(_article(s, colours, first, decode, most) for s in shown),
    ).replace('<form id="look"', f'<form id="look" data-legends="{_legends(colours)}"', 1)


def _legends(colours: Sequence[str]) -> str:
    pairs = ",".join(f'"{what}":"{legend(what)}"' for what in colours)
    return html.escape(f"{{{pairs}}}", quote=True)


def _article(
    sample: RecordedSample, colours: Sequence[str], first: str, decode: Decode | None, most: float
) -> str:
    """One sample: its numbers, prompt, and response token by token."""
    numbers = {key: sample.number(key) for key in KEYS}
    known = {key: value for key, value in numbers.items() if value is not None}
    data = "".join(f' data-{key}="{value!r}"' for key, value in known.items())
    words = [f"iteration {sample.iteration}", f"row {sample.row}"]
    words += [] if sample.group is None else [f"group {sample.group}"]
    words += [f"{key} {value:.4g}" for key, value in known.items() if key not in ("iteration",)]
    spans = "".join(f"<span>{html.escape(word)}</span>" for word in words)
    cut = sample.ended
    spans += f'<span class="{cut}">{cut}</span>' if cut else ""
    prompt = html.escape(str(sample.value("prompt") or ""))
    return (
        f'<article{data}><h2>{spans}</h2><pre class="prompt">{prompt}</pre>'
        f"<pre>{_tokens(sample, colours, first, decode, most)}</pre></article>"
    )


def _tokens(
    sample: RecordedSample, colours: Sequence[str], first: str, decode: Decode | None, most: float
) -> str:
    """The tokens of a response with their numbers; its text where there are no tokens."""
    ids = sample.value(RESPONSE)
    if not ids or decode is None:
        return html.escape(str(sample.value("response") or ""))
    found = {what: sample.per_token(what) for what in colours}
    values = {what: each for what, each in found.items() if each is not None}
    scales = {what: colour_scale(what, each, most) for what, each in values.items()}
    made = []
    for place, word in enumerate(decode(ids)):
        data = "".join(f' data-{what}="{scale[place]:.3g}"' for what, scale in scales.items())
        told = ", ".join(f"{what} {each[place]:.4g}" for what, each in values.items())
        style = _style(scales[first][place]) if first in scales else ""
        made.append(f'<i title="{told}"{data}{style}>{html.escape(word)}</i>')
    return "".join(made)


def _style(number: float) -> str:
    """The colour of a token where no script runs."""
    if abs(number) < 0.04:
        return ""
    kind = "good" if number > 0 else "bad"
    return f' style="background:rgba(var(--{kind}),{abs(number) * 0.45:.3g})"'
