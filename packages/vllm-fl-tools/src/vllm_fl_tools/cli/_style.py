"""How a report's page looks: its colours in light and in dark, on a phone and on paper."""

from __future__ import annotations

__all__ = ["COLOURS", "STYLE"]

COLOURS = {
    "--paper": ("#ffffff", "#14171b"),
    "--raised": ("#f3f5f8", "#1e2329"),
    "--ink": ("#1b1f24", "#e8eaed"),
    "--muted": ("#57606a", "#a5adb6"),
    "--grid": ("#dfe3e8", "#343b43"),
    "--link": ("#0a58b0", "#7db8ff"),
    "--good": ("#0b5a2e", "#8be0ab"),
    "--good-back": ("#dcf3e4", "#12381f"),
    "--bad": ("#9b1420", "#ffb0b4"),
    "--bad-back": ("#fde3e4", "#4c161b"),
    "--open": ("#6b4700", "#f3d37a"),
    "--open-back": ("#fbeecb", "#40320c"),
    "--s0": ("#1a48cf", "#80c9ff"),
    "--s1": ("#9e2a05", "#e27631"),
    "--s2": ("#0a6f5b", "#36929a"),
    "--s3": ("#d150b1", "#b75fff"),
    "--s4": ("#af8e21", "#ffff32"),
    "--s5": ("#3b1a56", "#b3d99f"),
}
"""Colours in light and in dark: text on its ground has a contrast of 4.5 or more, lines of plots of
3 or more. The series `--s…` are far apart also for readers who see no red or no green."""

_VARIABLES = ";".join(f"{name}:light-dark({','.join(pair)})" for name, pair in COLOURS.items())

STYLE = f"""
:root{{color-scheme:light dark;{_VARIABLES}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}}
main{{max-width:78rem;margin:0 auto;padding:1rem}}
h1{{font-size:1.7rem;line-height:1.2;margin:.5rem 0 1rem}}
h2{{font-size:1.35rem;line-height:1.3;margin:3rem 0 .75rem;padding-top:.75rem}}
h2{{border-top:2px solid var(--grid)}}
h3{{font-size:1.1rem;margin:2.25rem 0 .5rem}}
h1,h2,h3,p,a,code{{overflow-wrap:anywhere}}
td,th,caption,td a,th a{{overflow-wrap:break-word}}
p{{margin:.5rem 0;max-width:60rem}}
a{{color:var(--link)}}
code{{font-size:.9em}}
.scroll{{overflow-x:auto;margin:.75rem 0 1.25rem;max-width:100%}}
.scroll:focus-visible{{outline:2px solid var(--link)}}
table{{border-collapse:collapse;font-size:.875rem;font-variant-numeric:tabular-nums}}
caption{{text-align:left;color:var(--muted);padding:0 0 .4rem}}
caption span{{display:block;position:sticky;left:0;width:fit-content}}
caption span{{max-width:min(60rem,calc(100vw - 2rem))}}
th,td{{text-align:left;vertical-align:top;padding:.3rem .7rem;border-bottom:1px solid var(--grid)}}
th,td{{min-width:3.5rem;max-width:26rem}}
thead th{{background:var(--raised);white-space:nowrap}}
tbody th{{font-weight:600;position:sticky;left:0;background:var(--paper);max-width:14rem}}
td.prose{{min-width:15rem}}
.dense th,.dense td{{padding:.25rem .45rem;white-space:nowrap}}
.dense tbody th{{max-width:none}}
@media screen and (max-width:40rem){{.dense tbody th{{white-space:normal;max-width:8.5rem}}}}
.more{{display:block;color:var(--muted);font-size:.8rem;white-space:nowrap}}
.badge{{display:inline-block;border-radius:.3rem;padding:0 .4rem;font-weight:600}}
.badge{{white-space:nowrap}}
.good{{color:var(--good);background:var(--good-back)}}
.bad{{color:var(--bad);background:var(--bad-back)}}
.open{{color:var(--open);background:var(--open-back)}}
.told{{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}}
td,th{{position:relative}}
.legend{{font-size:.875rem}}
.mark{{display:inline-block;margin-right:1.1rem}}
.beside{{display:flex;flex-wrap:wrap;gap:0 2.5rem}}
.plots{{display:flex;flex-wrap:wrap;gap:1rem}}
figure{{margin:0;flex:1 1 20rem;max-width:34rem;min-width:0}}
figcaption{{font-size:.875rem;color:var(--muted);text-align:center}}
svg{{display:block;width:100%;height:auto;font:9px system-ui,sans-serif}}
svg *{{stroke-linejoin:round;stroke-linecap:butt}}
@media print{{
:root{{color-scheme:light}}
@page{{margin:12mm}}
body{{font-size:9pt}}
main{{max-width:none;padding:0}}
.scroll{{overflow:visible}}
table{{font-size:7pt}}
th,td{{padding:.15rem .3rem;min-width:0}}
.dense th,.dense td{{padding:.1rem .15rem;font-size:6pt;white-space:normal}}
.more{{font-size:6pt;white-space:normal}}
tbody th{{position:static}}
tr,figure{{break-inside:avoid}}
h2,h3,caption{{break-after:avoid}}
}}
"""
